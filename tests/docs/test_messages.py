"""``tests/messages.txt`` lists every text that infeed shows to users, for reviewers."""

import ast

from tools.messages import SNAPSHOT, messages, messages_in


def test_the_list_of_messages_is_up_to_date() -> None:
    """After a conflict, regenerate the file."""
    assert SNAPSHOT.read_text(encoding="utf-8") == messages(), "run python tools/messages.py"


def test_messages_are_found_in_all_forms() -> None:
    code = '''
"""A module docstring."""
TITLE = "time per sample"
def check(name, value):
    """A docstring of a function."""
    if value < 0:
        raise ValueError(f"{name}={value.real!r} must be " + "at least 0; use 0")
    warnings.warn("batches are copied", stacklevel=2)
    _LOG.info("%d workers were added", value)
    print(f"{value} {'new workers' if value else 'no'}")
    bound = "CPU-bound" if value else "I/O-bound"
    rows = {"busy": f"{value['share']:.0%} of the time by {min(1.0, value)}"}
    rows["idle"] = ", ".join(f"{one}" for one in value)
    page = "<p>Enable JavaScript to see it.</p>"
    layout = {"hovermode": "x unified", "title": {"text": "time of one sample"}}
    zero = "/dev/zero (deleted)"
    methods = {list: "append clear extend __setitem__ __delitem__"}
    is_old = "Original Traceback" in name or name.startswith("while loading")
    return {"key": "value", "path": f"/{name}/{value}"}
'''
    assert [(use, text) for _, use, text in messages_in(ast.parse(code))] == [
        ("text", "time per sample"),
        ("ValueError", "{name}={real} must be at least 0; use 0"),
        ("warning", "batches are copied"),
        ("log.info", "%d workers were added"),
        ("print", "new workers"),
        ("label", "CPU-bound"),
        ("label", "I/O-bound"),
        ("label", "busy"),
        ("text", "{share} of the time by {value}"),
        ("label", "idle"),
        ("text", " Enable JavaScript to see it. "),
        ("text", "time of one sample"),
    ]
