# Random programs of the generated suites: the choices of a seed, a list of the program's steps, and errors with both.
# No operation and no oracle is here.
import contextlib
import random

REFUSALS = (ValueError, RuntimeError, NotImplementedError, TypeError)  # what bad input may get; others are our bugs


class Program(random.Random):
    """A seed's choices. `lines` describe the program's steps."""

    def __init__(self, seed, *kinds):
        self.number, self.kinds, self.lines = seed, kinds, []
        super().__init__(" ".join(map(str, (seed, *kinds))))

    def say(self, line):
        self.lines.append(line)

    def chance(self, probability):
        return self.random() < probability

    def some(self, items, probability=0.5):
        """Each of them by chance, in their order."""
        return [item for item in items if self.chance(probability)]

    @contextlib.contextmanager
    def told(self):
        """Whatever is raised inside carries the seed and the program."""
        try:
            yield self
        except BaseException as error:
            error.add_note("\n".join((f"seed {self.number} {' '.join(map(str, self.kinds))}:", *self.lines)))
            raise


def refused(call, *args):
    """The error that call(*args) was refused with, or None."""
    try:
        call(*args)
    except REFUSALS as error:
        return error
    return None
