"""What an attacker does to bytes and to JSON, drawn from a seed."""

import json
import random

NUMBERS = (0, 1, 2, 3, 7, 8, 15, 16, 127, 128, 255, 256, *(2**n for n in (15, 16, 31, 32, 48, 53, 63, 64)), 2**31 - 1)
LARGEST = 1 << 20  # bytes that one change adds
LENGTHS = (1, 2, 3, 16, 17, 33, 64, 65, 300, 5000, 60000)  # of what is repeated


class Raw(str):
    """JSON text as it shall stand in the document, right or wrong."""


class Pairs(list):
    """An object as a list of names and values: names may come twice."""


VALUES = (
    *(None, True, False, -1, 1.0, 0.5, -0.0, 1e300, 10**400, *NUMBERS),
    *("", " ", "x", "\0", "\x1b[31mred\x1b[0m", "\u202e", "\n", "../../etc", "/", "re:(a+)+$"),
    *("F64", "F6_E2M3", "BF16", "I32"),
    *("٣", "²", "layers.٣.weight", "1" * 5000, "a" * 70000, "model.layers.0", "model.layers." + "9" * 5000, "weight"),
    *([], [0], [-1], [2, 3], [1.0], ["1"], [True], [None], [0, 24]),
    *([2**62] * 20, [2**32, 2**32], [1] * 65, [1] * 100000),
    *(Pairs(), Pairs([("a", 1)]), Pairs([("a", 1), ("a", 2)]), Pairs([("name", "w4a16")])),
    *map(Raw, ("NaN", "Infinity", "1e999", "01", '"\\ud800"', "", "1" * 6000)),
    *map(Raw, ("[" * 100000, "[" * 900 + "]" * 900, '{"a":' * 50000)),
)


def dump(node):
    """JSON text, with what is raw as it is."""
    if isinstance(node, Raw):
        return str(node)
    if isinstance(node, Pairs):
        return "{" + ",".join(f"{json.dumps(name)}:{dump(value)}" for name, value in node) + "}"
    if isinstance(node, list):
        return "[" + ",".join(map(dump, node)) + "]"
    return json.dumps(node)


def dump_one(tree, at):
    """JSON text of one of a list's or an object's values."""
    return dump(tree[at][1] if isinstance(tree, Pairs) else tree[at])


def load(text):
    """The inverse. Raises ValueError for what is no JSON."""
    return json.loads(text, object_pairs_hook=Pairs)


class Mutator:
    """Cases after a seed.

    Arguments:
        seed: of all that is drawn.
        seeds: bytes that are well formed.
    """

    def __init__(self, seed, seeds):
        self.random, self._seeds = random.Random(seed), seeds

    def case(self, changed=None):
        """The next case. `changed(mutator, data)` is the target's own way; None: `document`."""
        data = self.random.choice(self._seeds)
        for _ in range(self.random.choice((1, 1, 1, 2, 3, 5))):
            data = (changed or Mutator.document)(self, data)
        return data

    def document(self, data):
        """JSON changed in its structure, or bytes changed."""
        return self.json(data) if self.random.random() < 0.7 else self.bytes(data)

    def json(self, data):
        """JSON with one place changed; bytes changed where it is none any more."""
        try:
            return dump(self._changed(load(data))).encode(errors="surrogatepass")
        except (ValueError, RecursionError):
            return self.bytes(data)

    def bytes(self, data):
        """Bytes with one place changed."""
        at = self.random.randrange(len(data) + 1)
        end = min(len(data), at + self.random.choice(LENGTHS))
        number = self.random.choice(NUMBERS)
        width = self.random.choice((1, 2, 4, 8))
        piece = (number % (1 << 8 * width)).to_bytes(width, self.random.choice(("little", "big")))
        noise = self.random.randbytes(self.random.choice((1, 2, 8, 100)))
        other = self.random.choice(self._seeds)
        cut = self.random.randrange(len(other) + 1)
        bit = bytes([data[at] ^ 1 << self.random.randrange(8)]) if at < len(data) else b""
        return self.random.choice(
            (
                data[:at] + bit + data[at + 1 :],
                data[:at] + piece + data[at + width :],
                data[:at] + noise + data[at:],
                data[:at] + data[end:],
                data[:end] + data[at:end] * self.random.choice((1, 2, 100)) + data[end:],
                data[:at],
                data[at:],
                data[:at] + other[cut:],
            )
        )

    def _changed(self, tree):
        """A tree with one node changed. Nodes are drawn from the top: what is near it decides more."""
        if not isinstance(tree, list) or not tree or self.random.random() < 0.15:
            return self.random.choice(VALUES)
        at = self.random.randrange(len(tree))
        how = self.random.random()
        changed = type(tree)(tree)
        if how < 0.6:
            inner = tree[at][1] if isinstance(tree, Pairs) else tree[at]
            inner = self._changed(inner)
            changed[at] = (tree[at][0], inner) if isinstance(tree, Pairs) else inner
        elif how < 0.7:
            del changed[at]
        elif how < 0.8:
            changed.insert(self.random.randrange(len(tree) + 1), tree[at])
        elif how < 0.85:
            changed.extend([tree[at]] * min(self.random.choice(LENGTHS), LARGEST // len(dump_one(tree, at)) + 1))
        elif how < 0.95 and isinstance(tree, Pairs):
            name = self.random.choice([value for value in VALUES if type(value) is str])
            changed[at] = (self.random.choice((name, tree[at][0] + name)), tree[at][1])
        elif isinstance(tree, Pairs):
            changed += [(f"{tree[at][0]}{n}", tree[at][1]) for n in range(self.random.choice(LENGTHS))]
        else:
            self.random.shuffle(changed)
        return changed
