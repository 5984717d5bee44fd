"""Lines of the user's code."""

from __future__ import annotations

import traceback
from collections.abc import Sequence


def is_users_code(file: str) -> bool:
    """Whether a file is neither torch's nor ours."""
    return "/torch/" not in file and "/partita/" not in file


def innermost_place(frames: Sequence[traceback.FrameSummary]) -> str:
    """Return ``file:line`` of the innermost of some frames that is the user's, outermost first."""
    users = [frame for frame in frames if is_users_code(frame.filename)]
    return f"{users[-1].filename}:{users[-1].lineno}" if users else "unknown line"
