"""A stand-in for the environment of kvpress: answers as ``octavo.scripts.kvpress_kept`` does, without kvpress or torch.

StreamingLLMPress keeps what it should; any other press the first tokens.
"""

import json
import sys
from pathlib import Path


def kept(press, arguments, tokens, length):
    if press == "BrokenPress":
        raise ValueError("it broke")
    sinks = arguments.get("n_sink", 4) if press == "StreamingLLMPress" else tokens
    return [*range(sinks), *range(length - tokens + sinks, length)]


def main():
    config = json.loads((Path(json.loads(sys.stdin.readline())["model"]) / "config.json").read_text())
    print(json.dumps({"kvpress": "0", "torch": "0", "transformers": "0"}), flush=True)
    layers, heads = range(config["num_hidden_layers"]), range(config["num_key_value_heads"])
    for line in sys.stdin:
        request = json.loads(line)
        answer = []
        try:
            for asked in request["presses"]:
                counts = [asked["tokens"]] * len(layers) if isinstance(asked["tokens"], int) else asked["tokens"]
                one = (asked["press"], asked["arguments"])
                answer.append([[kept(*one, counts[layer], len(request["ids"])) for _ in heads] for layer in layers])
            print(json.dumps({"kept": answer}), flush=True)
        except ValueError as error:
            print(json.dumps({"error": f"ValueError: {error}"}), flush=True)


main()
