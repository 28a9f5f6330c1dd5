"""Elastic training loops of your own: ranks are lost, leave and join while the loop goes on."""

from hvdtrain.elastic.loop import Ranks, State, init, run

__all__ = ["Ranks", "State", "init", "run"]
