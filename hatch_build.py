"""Put the task files and the plans of sweeps into wheels, beside the package that looks for them there."""

# hatchling is only there while a wheel is built.
# pyright: reportMissingImports=false, reportUntypedBaseClass=false, reportUnknownVariableType=false

from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class CustomBuildHook(BuildHookInterface):
    """Includes folders of the source tree."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Add the folders, unless the install is editable: it finds them in the source tree.

        There a folder `replayeval` in site-packages would hide the package itself.
        """
        if version != "editable":
            build_data["force_include"] |= {"configs": "replayeval/configs", "tasks": "replayeval/task_files"}
