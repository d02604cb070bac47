"""What is attacked: everything that reads bytes which somebody else wrote."""

from tests.hostile import of_checkpoints, of_commands, of_syncs

TARGETS = of_checkpoints.TARGETS | of_syncs.TARGETS | of_commands.TARGETS
