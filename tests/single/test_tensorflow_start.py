"""How TensorFlow is imported."""

import gc

import pytest

from hvdtrain.system import tensorflow_start


@pytest.mark.parametrize("was_enabled", [True, False])
def test_garbage_collection_waits_for_the_import_and_leaves_it_alone(was_enabled, monkeypatch):
    seen = []
    monkeypatch.delitem(tensorflow_start.sys.modules, "tensorflow", raising=False)
    monkeypatch.setattr(tensorflow_start.cuda_libraries, "preload", lambda: None)

    class Finder:
        @staticmethod
        def find_spec(name, path=None, target=None):
            if name == "tensorflow":
                seen.append(gc.isenabled())
                raise ModuleNotFoundError(name)

    monkeypatch.setattr(tensorflow_start.sys, "meta_path", [Finder, *tensorflow_start.sys.meta_path])
    frozen = gc.get_freeze_count()
    (gc.enable if was_enabled else gc.disable)()
    try:
        with pytest.raises(ModuleNotFoundError):
            tensorflow_start.import_tensorflow()
        assert seen == [False]
        assert gc.isenabled() == was_enabled
        assert gc.get_freeze_count() > frozen
    finally:
        gc.enable()
        gc.unfreeze()
