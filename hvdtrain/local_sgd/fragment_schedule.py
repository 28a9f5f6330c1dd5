"""The order in which fragments are averaged, and the steps between two of them."""


class FragmentSchedule:
    """Averages one fragment after the other, each once in a cycle of H steps (Streaming DiLoCo, arXiv:2501.18512).

    Args:
        count: the number of fragments (F), at most H.
    """

    def __init__(self, count: int):
        self._count = count
        self.next = 0
        """The fragment that is averaged at the end of the current round."""

    def steps(self, every: int) -> int:
        """Steps of the current round; rounds of a cycle differ by at most one step.

        Args:
            every: steps of a cycle (H).
        """
        return (self.next + 1) * every // self._count - self.next * every // self._count

    def advance(self) -> None:
        """Begins the next round."""
        self.next = (self.next + 1) % self._count

    def go_back(self) -> None:
        """Returns to the round before: its average has failed."""
        self.next = (self.next - 1) % self._count
