"""What a long command says while it works: a spinner in a terminal, elsewhere a line after two seconds and then every half minute."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator

from rich.console import Console

from coterie_deploy.terminal.printable import printable
from coterie_deploy.terminal.tables import duration

FIRST_S, EVERY_S = 2.0, 30.0


@contextlib.contextmanager
def waiting(console: Console, text: str) -> Iterator[Callable[[str], None]]:
    """Says `text` on a console of standard error while the block runs. Gives the function that changes it."""
    if console.is_terminal:
        with console.status(printable(text)) as status:
            yield lambda other: status.update(printable(other))
        return
    said, began = [text], time.monotonic()

    def say() -> None:
        print(f"{printable(said[-1])} ({duration(time.monotonic() - began)} so far)", file=console.file, flush=True)

    with repeating(say, FIRST_S, EVERY_S):
        yield said.append


@contextlib.contextmanager
def repeating(say: Callable[[], None], first_s: float, every_s: float) -> Iterator[None]:
    """Calls `say` in a thread while the block runs: after `first_s`, and then every so many seconds."""
    over = threading.Event()

    def repeat() -> None:
        pause = first_s
        while not over.wait(pause):
            say()
            pause = every_s

    saying = threading.Thread(target=repeat, name="coterie-waiting", daemon=True)
    saying.start()
    try:
        yield
    finally:
        over.set()
        saying.join()
