"""Each process of vLLM that tests start imports this, and uses no AMX.

vLLM's kernels for AMX round more than those for AVX-512, whose differences the tests' bounds are from, and its workers
end at the first of them where a process has to ask the system for AMX (vLLM 0.32).
"""

import importlib.abc
import importlib.util
import sys


class WithoutAmx(importlib.abc.MetaPathFinder):
    """Changes what torch says of the processor, once a process imports torch."""

    def find_spec(self, name, path=None, target=None):
        if name != "torch.cpu":
            return None
        sys.meta_path.remove(self)
        found = importlib.util.find_spec(name)
        run = found.loader.exec_module

        def changed(module):
            run(module)
            module._is_amx_tile_supported = lambda: False

        found.loader.exec_module = changed
        return found


sys.meta_path.insert(0, WithoutAmx())
