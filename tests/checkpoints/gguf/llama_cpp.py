"""llama.cpp in a process of its own: what a GGUF file's model says about prompts, and how it splits texts."""

import json

from tests.helpers import run_python


def ask(path, prompts=(), texts=()):
    """(log-probabilities of the token after each prompt [prompts, vocabulary], tokens of each text).

    Arguments:
        path: a GGUF file with a tokenizer.
        prompts: lists of numbers of tokens.
        texts: strings.
    """
    done = run_python("-m", f"{__name__}_process", path, json.dumps({"prompts": list(prompts), "texts": list(texts)}))
    answer = json.loads(done.stdout.splitlines()[-1])
    return answer["log_probabilities"], answer["tokens"]
