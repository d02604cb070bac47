"""vLLM on folders, in its own environment: `python live_vllm_process.py question.json answer.npz`.

The question has `folders`, `adapters` (for each folder a PEFT folder or null), `tokens` (the prompt)
and `generated` (how many tokens to add). The answer has, for folder i, `prompt_i` [tokens - 1, vocabulary], the
log-probabilities of each token but the first, and `greedy_i` [generated].
"""

import json
import os
import pathlib
import sys

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"

import numpy as np
from vllm import LLM, SamplingParams
from vllm.lora.request import LoRARequest

question = json.loads(pathlib.Path(sys.argv[1]).read_text())
answer = {}
for i, (folder, adapter) in enumerate(zip(question["folders"], question["adapters"], strict=True)):
    options = {"enable_lora": True, "max_lora_rank": 8, "max_loras": 1} if adapter else {}
    engine = LLM(folder, skip_tokenizer_init=True, enforce_eager=True, max_model_len=128, max_logprobs=-1, **options)
    wanted = SamplingParams(temperature=0, max_tokens=question["generated"], prompt_logprobs=-1, detokenize=False)
    request = LoRARequest("adapter", 1, adapter) if adapter else None
    said = engine.generate({"prompt_token_ids": question["tokens"]}, wanted, lora_request=request)[0]
    rows = said.prompt_logprobs[1:]
    answer[f"prompt_{i}"] = np.array([[row[token].logprob for token in range(len(row))] for row in rows])
    answer[f"greedy_{i}"] = np.array(said.outputs[0].token_ids)
    del engine
np.savez(sys.argv[2], **answer)
