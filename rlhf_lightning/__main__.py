"""`python -m rlhf_lightning` is `rlhf`."""

from rlhf_lightning.entry import main

if __name__ == "__main__":
    main()
