"""A journal on a disk that fails, together with everything that must hold of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Self

from fake_disk import Crash, FakeDisk

from narrows.broker.storage.chain import Chain
from narrows.broker.storage.disk import Files
from narrows.broker.storage.journal import Journal, JournalError
from narrows.broker.storage.seal import SealKey
from narrows.broker.storage.segments import RECORD_HEADER_BYTES, SEGMENT_HEADER_BYTES
from narrows.proto.errors import ErrorCode

RUN = "0123456789abcdef"
SEGMENT_BYTES = 512


def opened(files: Files, segment_bytes: int = SEGMENT_BYTES, chain: Chain | None = None) -> Journal:
    return Journal.open(files, run_id=RUN, segment_bytes=segment_bytes, chain=chain)


def contents(journal: Journal, first: int | None = None) -> list[bytes]:
    """The bodies from `first` on; their numbers have no gaps."""
    first = journal.first if first is None else first
    records = list(journal.records(first))
    assert [each.number for each in records] == list(range(first, first + len(records)))
    return [bytes(each.body) for each in records]


def body(number: int, size_bytes: int, life: int = 0) -> bytes:
    """Tells its number, size and the life of the writer."""
    unit = f"{life}:{number}:{size_bytes} ".encode()
    return (unit * (size_bytes // len(unit) + 1))[:size_bytes]


class Story:
    """The records and promises of a journal, over crashes; `check` compares the disk with them.

    `bodies` are the records that may be there, from number 1 on. Those up to `promised` must be
    there, unless they are older than `cut`. Nothing else may be there.
    """

    chain: Chain | None = None

    def __init__(self, disk: FakeDisk, segment_bytes: int = SEGMENT_BYTES) -> None:
        self.disk = disk
        self.segment_bytes = segment_bytes
        self.journal: Journal | None = None
        self.bodies: list[bytes] = []
        self.cut = 1
        self.life = 0
        self._promised = 0
        self._others: list[list[bytes]] = []
        """Other records that may come back, as long as nobody has called sync since open."""

    @property
    def promised(self) -> int:
        return max(self._promised, self.journal.durable if self.journal else 0)

    def open(self) -> Journal:
        """Another process opens the journal; the process before it has died."""
        self._promised, self.journal = self.promised, None
        self.life += 1
        journal = opened(self.disk, self.segment_bytes, self.chain)
        found = contents(journal)
        last = journal.first + len(found) - 1
        assert journal.first <= self.cut
        assert self.promised <= last
        assert journal.durable <= last
        histories = [self.bodies, *self._others]
        same = [each for each in histories if each[journal.first - 1 : last] == found]
        assert same, "other records than were appended"
        self._others, self.bodies, self.journal = histories, same[0][:last], journal
        return journal

    def append(self, size_bytes: int) -> None:
        journal = self.journal or self.open()
        number = len(self.bodies) + 1
        self.bodies.append(body(number, size_bytes, self.life))
        assert journal.append([self.bodies[-1][:3], self.bodies[-1][3:]]) == number

    def sync(self) -> None:
        (self.journal or self.open()).sync()
        assert self.promised == len(self.bodies)
        self._others = []

    def cut_before(self, number: int) -> None:
        # Whoever cuts has a checkpoint of what is durable, and of nothing else.
        number = min(number, self.promised + 1)
        self.cut = max(self.cut, number)
        (self.journal or self.open()).cut_before(number)

    def on(self, disk: FakeDisk) -> Self:
        """The same story so far, to be continued on what has survived of the disk."""
        story = type(self)(disk, self.segment_bytes)
        story.bodies, story.cut, story.life = [*self.bodies], self.cut, self.life
        story._promised = self.promised
        story._others = [*self._others]
        return story

    def follow(self, script: Script) -> None:
        for step in script:
            step(self)

    def crashes(self, script: Script) -> bool:
        """True if the power went before the script was over."""
        try:
            self.follow(script)
        except Crash:
            return True
        return False


class SealedStory(Story):
    """The same of a journal that is sealed."""

    chain = Chain(SealKey(b"k" * 32))


Step = Callable[[Story], None]
Script = Iterable[Step]


def append(*sizes_bytes: int) -> Step:
    def work(story: Story) -> None:
        for each in sizes_bytes:
            story.append(each)

    return work


def sync(story: Story) -> None:
    story.sync()


def reopen(story: Story) -> None:
    story.open()


def cut_before(number: int) -> Step:
    return lambda story: story.cut_before(number)


def persistent(step: Step) -> Step:
    """The step, tried again until the disk takes it; what fails is said in the right words."""

    def work(story: Story) -> None:
        for _ in range(20):
            try:
                return step(story)
            except JournalError as error:
                assert error.code == ErrorCode.JOURNAL_FAILED and error.remedy
        raise AssertionError("there is no end to it")

    return work


def calls_of(script: Script, make: Callable[[], Story]) -> int:
    """Number of calls that a script makes if nothing fails."""
    story = make()
    story.follow(script)
    return len(story.disk.calls)


def three_segments(kind: type[Story] = Story) -> tuple[dict[str, bytes], list[bytes]]:
    """The files of a small journal and its bodies: batches of several records, free room."""
    story = kind(FakeDisk(), SEGMENT_BYTES if kind is Story else 2 * SEGMENT_BYTES)
    for sizes in ((20, 5), (0, 60, 31), (40, 40), (7, 50), (30, 1), (77,), (30,), (9, 9)):
        story.follow((append(*sizes), sync))
    files = story.disk.contents()
    assert len(files) == 3
    assert all(content[-1] == 0 for content in files.values()), "no free room"
    return files, story.bodies


def record_bytes(*bodies_bytes: int) -> int:
    return sum(RECORD_HEADER_BYTES + each for each in bodies_bytes)


def segment_bytes(*bodies_bytes: int) -> int:
    return SEGMENT_HEADER_BYTES + record_bytes(*bodies_bytes)
