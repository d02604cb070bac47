"""A process that runs llama.cpp on a GGUF file and prints the answers to a request; see `llama_cpp.ask`."""

import json
import sys
import urllib.request

import xllamacpp


def main(path, request):
    params = xllamacpp.CommonParams()
    params.model.path = path
    params.n_ctx, params.n_parallel, params.port, params.verbosity = 256, 1, 0, -1
    params.warmup = params.cache_prompt = False
    params.no_extra_bufts = True  # Q4_0 as it is in the file, not repacked for the processor
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
    params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    server = xllamacpp.Server(params)
    print(json.dumps({"log_probabilities": [after(server, p) for p in request["prompts"]],
                      "tokens": [tokens(server, t) for t in request["texts"]]}))  # fmt: skip


def after(server, prompt):
    """Log-probabilities of all tokens after a prompt."""
    asked = {"prompt": prompt, "n_predict": 1, "n_probs": 1 << 20, "temperature": 1.0, "samplers": [], "seed": 1}
    found = server.handle_completions(asked)["choices"][0]["logprobs"]["content"][0]["top_logprobs"]
    return [entry["logprob"] for entry in sorted(found, key=lambda entry: entry["id"])]


def tokens(server, text):
    """The numbers of a text's tokens."""
    content = json.dumps({"content": text, "add_special": True, "parse_special": True}).encode()
    asked = urllib.request.Request(
        f"{server.listening_address}/tokenize", content, {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(asked, timeout=60) as answer:
        return json.load(answer)["tokens"]


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
