"""Pickles as plain data: numbers, text and containers. Nothing that a pickle names is imported, called or built: an
object becomes a record of its class and its fields. saved_files.py reads torch.save's files around pickles."""

from __future__ import annotations

import io
import pickletools
from collections.abc import Callable, Sequence

PLAIN = frozenset({"collections.OrderedDict"})  # names of classes that are plain data
_MOST_STEPS = 1 << 16  # instructions of one pickle: a module's state has a few hundred


class Unreadable(ValueError):
    """A pickle that is not plain data; the text gives the reason."""


class Name(str):
    """'module.name' that a pickle refers to: only this text."""

    __slots__ = ()


class Record:
    """An object in a pickle: the name of its class or function, its arguments, its state."""

    __slots__ = ("arguments", "name", "state")

    def __init__(self, name: Name, arguments: tuple) -> None:
        self.name, self.arguments, self.state = name, arguments, None

    def fields(self) -> dict:
        return self.state if isinstance(self.state, dict) else {}


class Machine:
    """Runs the instructions of one pickle. may_call(name): whether a call of it is accepted, which makes a record; any
    other name is accepted as a class only. outside(identity): the value of a persistent reference.

    names: every name in the pickle."""

    def __init__(self, may_call: Callable[[str], bool], outside: Callable[[object], object] | None = None) -> None:
        self._may_call, self._outside = may_call, outside
        self.stack: list = []
        self._marked: list[list] = []
        self._memo: dict[int, object] = {}
        self.names: list[Name] = []

    def run(self, file: io.BytesIO) -> object:
        for steps, (opcode, argument, _) in enumerate(pickletools.genops(file)):
            if steps > _MOST_STEPS:
                raise Unreadable(f"has more than {_MOST_STEPS} instructions")
            if opcode.name == "STOP":
                return self.pop()
            if opcode.name in _PUSHED:
                self.stack.append(argument)
                continue
            action = _ACTIONS.get(opcode.name)
            if action is None:
                raise Unreadable(f"has the instruction {opcode.name}")
            action(self, argument)
        raise Unreadable("does not end")

    def pop(self) -> object:
        if not self.stack:
            raise Unreadable("takes from an empty stack")
        return self.stack.pop()

    def pop_mark(self) -> list:
        if not self._marked:
            raise Unreadable("has no mark")
        items, self.stack = self.stack, self._marked.pop()
        return items

    def top(self, kind: type) -> object:
        if not self.stack or type(self.stack[-1]) is not kind:
            raise Unreadable(f"fills an object that is not a {kind.__name__}")
        return self.stack[-1]

    def push(self, value: object) -> None:
        self.stack.append(value)

    def mark(self, _: object) -> None:
        self._marked.append(self.stack)
        self.stack = []

    def put(self, index: int | None) -> None:
        if not self.stack:
            raise Unreadable("takes from an empty stack")
        self._memo[len(self._memo) if index is None else index] = self.stack[-1]

    def get(self, index: int) -> None:
        if index not in self._memo:
            raise Unreadable("reads a memo that it has not written")
        self.stack.append(self._memo[index])

    def name(self, module: object, name: object) -> None:
        if type(module) is not str or type(name) is not str:
            raise Unreadable("has a name that is not text")
        self.names.append(Name(f"{module}.{name}"))
        self.stack.append(self.names[-1])

    def stack_name(self, _: object) -> None:
        name, module = self.pop(), self.pop()
        self.name(module, name)

    def set_items(self, pairs: Sequence) -> None:
        target = self.top(dict)
        for key, value in zip(pairs[::2], pairs[1::2], strict=True):
            if type(key) not in (str, int, bool):  # their hash and comparison are harmless
                raise Unreadable("has a key that is neither text nor a number")
            target[key] = value

    def set_item(self, _: object) -> None:
        value, key = self.pop(), self.pop()
        self.set_items((key, value))

    def call(self, _: object) -> None:
        arguments, name = self.pop(), self.pop()
        if type(name) is not Name or type(arguments) is not tuple or not (name in PLAIN or self._may_call(name)):
            raise Unreadable(f"calls {name if type(name) is Name else 'an object without a name'}")
        self.stack.append({} if name == "collections.OrderedDict" else Record(name, arguments))

    def new(self, _: object) -> None:
        arguments, name = self.pop(), self.pop()
        if type(name) is not Name or type(arguments) is not tuple:
            raise Unreadable("makes an object of no class")
        self.stack.append(Record(name, arguments))

    def build(self, _: object) -> None:
        state = self.pop()
        record = self.top(Record)
        if record.state is not None:
            raise Unreadable("fills an object twice")
        record.state = state

    def refer(self, _: object) -> None:
        if self._outside is None:
            raise Unreadable("refers to something outside of it")
        self.stack.append(self._outside(self.pop()))


def _fill(kind: type) -> Callable[[Machine, object], None]:
    def action(machine: Machine, _: object) -> None:
        items = machine.pop_mark()
        if kind is dict:
            machine.push({})
            machine.set_items(items)
        else:
            machine.push(kind(items))

    return action


def _tuple_of(count: int) -> Callable[[Machine, object], None]:
    return lambda machine, _: machine.push(tuple([machine.pop() for _ in range(count)][::-1]))


def _add_marked(machine: Machine, _: object) -> None:
    items = machine.pop_mark()
    machine.top(list).extend(items)


def _set_marked(machine: Machine, _: object) -> None:
    items = machine.pop_mark()
    machine.set_items(items)


def _add(machine: Machine, _: object) -> None:
    item = machine.pop()
    machine.top(list).append(item)


def _global(machine: Machine, argument: str) -> None:
    machine.name(*argument.split(" ", 1))


# Pushed unchanged. Opcodes in no table (the extension registry, protocol 0, out-of-band buffers) are refused.
_INTEGERS = {"BININT", "BININT1", "BININT2", "LONG1", "LONG4"}
_TEXT = {"BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8"}
_PUSHED = _INTEGERS | _TEXT | {"BINFLOAT", "BINBYTES", "SHORT_BINBYTES", "BINBYTES8"}
_ACTIONS: dict[str, Callable] = {
    "PROTO": lambda machine, _: None,
    "FRAME": lambda machine, _: None,
    "NONE": lambda machine, _: machine.push(None),
    "NEWTRUE": lambda machine, _: machine.push(True),
    "NEWFALSE": lambda machine, _: machine.push(False),
    "EMPTY_LIST": lambda machine, _: machine.push([]),
    "EMPTY_TUPLE": lambda machine, _: machine.push(()),
    "EMPTY_DICT": lambda machine, _: machine.push({}),
    "MARK": Machine.mark,
    "POP": lambda machine, _: machine.pop(),
    "POP_MARK": lambda machine, _: machine.pop_mark(),
    "LIST": _fill(list),
    "TUPLE": _fill(tuple),
    "DICT": _fill(dict),
    "TUPLE1": _tuple_of(1),
    "TUPLE2": _tuple_of(2),
    "TUPLE3": _tuple_of(3),
    "APPEND": _add,
    "APPENDS": _add_marked,
    "SETITEM": Machine.set_item,
    "SETITEMS": _set_marked,
    "MEMOIZE": Machine.put,
    "BINPUT": Machine.put,
    "LONG_BINPUT": Machine.put,
    "BINGET": Machine.get,
    "LONG_BINGET": Machine.get,
    "GLOBAL": _global,
    "STACK_GLOBAL": Machine.stack_name,
    "REDUCE": Machine.call,
    "NEWOBJ": Machine.new,
    "BUILD": Machine.build,
    "BINPERSID": Machine.refer,
}
