"""Your own elastic training loops: ranks are lost, leave and join while the loop continues."""

from hvdtrain.elastic.loop import Ranks, State, init, run

__all__ = ["Ranks", "State", "init", "run"]
