"""System calls that a confined program may make: a filter by seccomp(2), for x86-64 and ARM64.

`system_calls.txt` lists the calls that the program and its libraries need. Some may be made only
with some arguments: a socket of TCP, but none of MPTCP, whose connections Landlock does not check.
A call that is not listed fails with ENOSYS, as on a system without the call, and is reported to the
helper process outside of the sandbox, so that the program can name it to its owner.
"""

from __future__ import annotations

import ctypes
import fcntl
import platform
import socket
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from errno import EBUSY, ENOSYS, EPERM
from functools import cache
from pathlib import Path

_LOAD, _EQUAL, _LEAST, _AND, _RETURN = 0x20, 0x15, 0x35, 0x54, 0x06  # instructions of BPF
_ERROR = 0x00050000
ALLOW, REPORT = 0x7FFF0000, 0x7FC00000
REFUSE, ABSENT, NO_EFFECT = _ERROR | EPERM, _ERROR | ENOSYS, _ERROR
_SET_FILTER, _NEW_LISTENER = 1, 1 << 3  # seccomp
_RECEIVE, _SEND = 0xC0502100, 0xC0182101  # ioctl on the listener
_NOTICE = struct.Struct("=QIIiIQ6Q")  # id, process, flags, number, architecture, address, arguments
_REPLY = struct.Struct("=QqiI")  # id, value, error, flags
_X32 = 0x40000000
_WHOLE = 0xFFFFFFFF
_KIND = 0xF  # bits of a socket's type; the others are flags
_TCP, _UDP = socket.IPPROTO_TCP, socket.IPPROTO_UDP
_FASTOPEN = 0x20000000  # flag of a message that also makes the connection
_TCP_ULP = 31  # option that makes a TCP socket one of another protocol
_TIOCSTI, _TIOCLINUX = 0x5412, 0x541C  # ioctl that type into the terminal
# Namespaces of mounts, control groups, host names, IPC, users, processes, networks.
_NAMESPACES = tuple(1 << bit for bit in (17, 25, 26, 27, 28, 29, 30))
_OF_OTHERS = tuple(1 << bit for bit in range(6))  # modes of the group and of all others
_PROCESSORS = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1)}  # audit number, column


@dataclass(frozen=True, slots=True)
class ArgumentTest:
    """Bits of an argument that must have a value."""

    argument: int
    value: int
    mask: int = _WHOLE
    high: bool = False  # the upper half of the argument


@dataclass(frozen=True, slots=True)
class CallRule:
    """Verdict on a call whose arguments pass all tests."""

    tests: tuple[ArgumentTest, ...]
    verdict: int


def _sockets() -> Iterator[CallRule]:
    yield CallRule(
        (ArgumentTest(0, socket.AF_UNIX), ArgumentTest(1, socket.SOCK_SEQPACKET, _KIND)), ALLOW
    )  # CUDA uses such sockets
    for family in (socket.AF_INET, socket.AF_INET6):
        for kind, protocol in ((socket.SOCK_STREAM, _TCP), (socket.SOCK_DGRAM, _UDP)):
            for number in (0, protocol):
                yield CallRule(
                    (
                        ArgumentTest(0, family),
                        ArgumentTest(1, kind, _KIND),
                        ArgumentTest(2, number),
                    ),
                    ALLOW,
                )
    for kind in (socket.SOCK_RAW, socket.SOCK_DGRAM):  # netlink, to read the machine's addresses
        yield CallRule(
            (ArgumentTest(0, 16), ArgumentTest(1, kind, _KIND), ArgumentTest(2, 0)), ALLOW
        )
    yield CallRule((), REFUSE)


def _allow_only(*tests: ArgumentTest, otherwise: int = REFUSE) -> tuple[CallRule, ...]:
    return CallRule(tests, ALLOW), CallRule((), otherwise)


def _refuse_bits(argument: int, bits: Sequence[int], verdict: int = REFUSE) -> tuple[CallRule, ...]:
    return (
        *(CallRule((ArgumentTest(argument, bit, bit),), verdict) for bit in bits),
        CallRule((), ALLOW),
    )


@cache
def _rules() -> Mapping[str, Sequence[CallRule]]:
    """Return the rules of calls whose arguments matter, by name; the first match decides."""
    pairs = (socket.SOCK_STREAM, socket.SOCK_SEQPACKET)  # datagrams can be sent to any name
    return {
        "socket": tuple(_sockets()),
        "socketpair": (
            *(
                CallRule((ArgumentTest(0, socket.AF_UNIX), ArgumentTest(1, pair, _KIND)), ALLOW)
                for pair in pairs
            ),
            CallRule((), REFUSE),
        ),
        "sendto": _refuse_bits(3, [_FASTOPEN]),
        "sendmsg": _refuse_bits(2, [_FASTOPEN]),
        "sendmmsg": _refuse_bits(3, [_FASTOPEN]),
        "setsockopt": (
            CallRule((ArgumentTest(1, _TCP), ArgumentTest(2, _TCP_ULP)), REFUSE),
            CallRule((), ALLOW),
        ),
        "ioctl": (
            *(CallRule((ArgumentTest(1, number),), REFUSE) for number in (_TIOCSTI, _TIOCLINUX)),
            CallRule((), ALLOW),
        ),
        "clone": _refuse_bits(0, _NAMESPACES),
        "clone3": (CallRule((), ABSENT),),  # its flags cannot be tested; libraries use clone then
        "io_uring_setup": (CallRule((), ABSENT),),  # its calls are not filtered
        "prlimit64": _allow_only(ArgumentTest(0, 0)),  # this process
        "sched_setaffinity": _allow_only(ArgumentTest(0, 0)),  # this thread
        "setpriority": _allow_only(ArgumentTest(0, 0), ArgumentTest(1, 0)),
        "move_pages": _allow_only(ArgumentTest(0, 0)),
        "personality": _allow_only(ArgumentTest(0, _WHOLE)),  # only reads the personality
        "chmod": _refuse_bits(1, _OF_OTHERS, NO_EFFECT),
        "fchmodat": _refuse_bits(2, _OF_OTHERS, NO_EFFECT),
        "fchmodat2": _refuse_bits(2, _OF_OTHERS, NO_EFFECT),
        # times of files that are open, not of any file by its name
        "utimensat": _allow_only(
            ArgumentTest(1, 0), ArgumentTest(1, 0, high=True), otherwise=NO_EFFECT
        ),
    }


def is_supported() -> bool:
    """Return True if the calls of this processor are listed."""
    return platform.machine() in _PROCESSORS


@cache
def listed_calls() -> tuple[tuple[str, int, bool], ...]:
    """Return each call of this processor: name, number, and whether the program needs it."""
    column = _PROCESSORS[platform.machine()][1]
    text = Path(__file__).with_suffix(".txt").read_text(encoding="ascii")
    rows = [line.split() for line in text.splitlines() if not line.startswith("#")]
    return tuple(
        (row[0], int(row[1 + column]), row[-1] == "+") for row in rows if row[1 + column] != "-"
    )


def install() -> int | None:
    """Filter the calls of this process and its children until they end. Return the file that
    reports refused calls, None if another program reads the reports of this process already. Raises
    OSError.
    """
    try:
        return _install(REPORT, _NEW_LISTENER)
    except OSError as error:
        if error.errno != EBUSY:  # the program that started this one reads its reports
            raise
        _install(ABSENT, 0)
        return None


def reports(listener: int) -> Iterator[str]:
    """Answer refused calls until the confined processes end; yield the name of each call that was
    not refused before.
    """
    names = {number: name for name, number, _ in listed_calls()}
    reported = set[int]()
    while True:
        notice = bytearray(_NOTICE.size)
        try:
            fcntl.ioctl(listener, _RECEIVE, notice)
            serial, _, _, number, *_ = _NOTICE.unpack(notice)
            fcntl.ioctl(listener, _SEND, bytearray(_REPLY.pack(serial, 0, -ENOSYS, 0)))
        except InterruptedError:
            continue
        except FileNotFoundError:  # the caller, or every confined process, has ended
            if _ended(listener):
                return
            continue
        if number not in reported:
            reported.add(number)
            yield names.get(number, f"number {number}")


def _ended(listener: int) -> bool:
    import select

    poll = select.poll()
    poll.register(listener, select.POLLIN)
    return any(event & select.POLLHUP for _, event in poll.poll(0))


def _install(other: int, flags: int) -> int:
    code = b"".join(struct.pack("=HBBI", *line) for line in _filter(other))
    body = ctypes.create_string_buffer(code)
    program = ctypes.create_string_buffer(
        struct.pack("@HP", len(code) // 8, ctypes.addressof(body))
    )
    numbers = {name: number for name, number, _ in listed_calls()}
    libc = ctypes.CDLL(None, use_errno=True)
    libc.syscall.restype = ctypes.c_long
    call = (numbers["seccomp"], _SET_FILTER, flags)
    result = int(libc.syscall(*map(ctypes.c_long, call), program))
    if result < 0:
        raise OSError(ctypes.get_errno(), "seccomp")
    return result


def _filter(other: int) -> Iterator[tuple[int, int, int, int]]:
    """Yield the filter's instructions; `other` is the verdict on calls that are not listed."""
    audit, _ = _PROCESSORS[platform.machine()]
    yield from ((_LOAD, 0, 0, 4), (_EQUAL, 1, 0, audit), (_RETURN, 0, 0, REFUSE), (_LOAD, 0, 0, 0))
    yield from ((_LEAST, 0, 1, _X32), (_RETURN, 0, 0, REFUSE))
    rules = _rules()
    for name, number, needed in listed_calls():
        if name in rules:
            body = [line for rule in rules[name] for line in _rule_instructions(rule)]
            yield (_EQUAL, 0, len(body), number)
            yield from body
        elif needed:
            yield from ((_EQUAL, 0, 1, number), (_RETURN, 0, 0, ALLOW))
    yield (_RETURN, 0, 0, other)


def _rule_instructions(rule: CallRule) -> Iterator[tuple[int, int, int, int]]:
    """Yield the instructions of one rule; a failed test jumps to the next rule."""
    for at, test in enumerate(rule.tests):
        left = 3 * (len(rule.tests) - at) - 2
        yield (_LOAD, 0, 0, 16 + 8 * test.argument + 4 * test.high)
        yield (_AND, 0, 0, test.mask)
        yield (_EQUAL, 0, left, test.value)
    yield (_RETURN, 0, 0, rule.verdict)
