"""What is attacked: everything that reads bytes which somebody else wrote."""

from tests.hostile import of_checkpoints, of_commands, of_configs, of_gguf, of_records, of_syncs

_MODULES = (of_checkpoints, of_gguf, of_configs, of_records, of_syncs, of_commands)
TARGETS = {name: target for module in _MODULES for name, target in module.TARGETS.items()}
assert len(TARGETS) == sum(len(module.TARGETS) for module in _MODULES), "two targets have one name"
