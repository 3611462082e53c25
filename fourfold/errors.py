"""The errors a user can cause. Each message is a sentence that names the thing, the value, the rule and a remedy.

The command line prints them without a traceback and exits with `exit_code`; anything else that is raised is a bug.
"""


class FourfoldError(Exception):
    """The common parent, so that the command line can tell a user's mistake from ours."""

    exit_code = 2


class ConfigError(FourfoldError):
    """A key, a value, or a combination of them. Carries every problem found, one sentence each."""

    def __init__(self, problems: list[str] | str) -> None:
        self.problems = [problems] if isinstance(problems, str) else list(problems)
        super().__init__("\n".join(self.problems))


class DataError(FourfoldError):
    """A corpus or token file that cannot be read as what it was said to be."""


class CheckpointError(FourfoldError):
    """A snapshot that is damaged, foreign, or of another model."""


class LaunchError(FourfoldError):
    """Processes that cannot be started, or that do not find each other."""
