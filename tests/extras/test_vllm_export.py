"""A vLLM as others start it reads what is exported: a merged model, and adapters beside their base."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import Qwen2Config

from rlhf_lightning.engines import FSDPEngine, Native, generation_engine
from rlhf_lightning.spec import EMBEDDED_DIRECTORY, LoRA, ModelSpec, OptimizerSpec, Sampling
from tests.extras import generating
from tests.extras.generating import TOKENIZER, prompts
from tests.unit.engines import tiny
from tests.unit.engines.decoders import table

CODE = """
import json, sys
from vllm import LLM, SamplingParams
from vllm.lora.request import LoRARequest

text, merged, base, adapters = sys.argv[1:]
sampling = SamplingParams(temperature=0, max_tokens=8)
small = {"dtype": "float32", "enforce_eager": True, "max_model_len": 64, "kv_cache_memory_bytes": 2**24}

def said(llm, **adapted):
    (output,) = llm.chat([{"role": "user", "content": text}], sampling, use_tqdm=False, **adapted)
    return list(output.outputs[0].token_ids)

adapted = LLM(base, enable_lora=True, **small)
found = [said(adapted), said(adapted, lora_request=LoRARequest("learned", 1, adapters))]
print("said:", json.dumps([*found, said(LLM(merged, **small))]))
"""
ALONE = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1"}
"""In one process, and without a word to anybody."""
TEXT = "What is 2 + 3?"


def answered(source: FSDPEngine, spec: ModelSpec) -> list[int]:
    """The native engine's answer to the text as the tokenizer's template renders it."""
    messages = [{"role": "user", "content": TEXT}]
    rendered = str(TOKENIZER.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
    rows = table([torch.tensor(TOKENIZER.encode(rendered, add_special_tokens=False))])
    engine = generation_engine(spec, source, seat=tiny.SEAT, ends=generating.ends(), config=Native())
    found = engine.generate(rows, sampling=Sampling(max_new_tokens=8, temperature=0), seed=1)
    answer: list[int] = found["response_ids"][0].tolist()
    return answer


def test_a_plain_vllm_says_what_the_run_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {**generating._SIZES, "vocab_size": 264}
    monkeypatch.setitem(generating.MODELS, "chats", Qwen2Config(**sizes, tie_word_embeddings=True))
    spec = generating.write(tmp_path / "base", "chats")
    for file in EMBEDDED_DIRECTORY.glob("tokenizer*"):
        shutil.copy(file, tmp_path / "base")
    begun = FSDPEngine(spec)
    learned = FSDPEngine(replace(spec, lora=LoRA(rank=4), optimizer=OptimizerSpec(lr=0.1)))
    generating.learn(learned, prompts([9]))
    learned.export(tmp_path / "merged")
    learned.export_adapters(tmp_path / "adapters")
    paths = [str(tmp_path / name) for name in ("merged", "base", "adapters")]
    run = subprocess.run(
        [sys.executable, "-c", CODE, TEXT, *paths],
        env=os.environ | ALONE,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    before, adapted, merged = json.loads(run.stdout.rpartition("said:")[2])
    assert before == answered(begun, spec)
    assert adapted == merged == answered(learned, spec) != before
