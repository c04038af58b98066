__version__ = '0'
