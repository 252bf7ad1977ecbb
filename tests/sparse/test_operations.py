"""What choosing costs beside its kernels: on a GPU every operation is a launch, in every layer of every step."""

from torch.utils._python_dispatch import TorchDispatchMode

from octavo.core import SamplingParams
from octavo.scripts.build import method


class Launched(TorchDispatchMode):
    """Names of the operations that a device would be given; views cost it nothing."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if not func.is_view:
            self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def test_from_the_second_layer_on_choosing_is_two_operations(make_llama, engine_for):
    """Whatever holds for all layers is worked out by the first one that chooses, and counted when all are done."""
    engine = engine_for(make_llama(num_hidden_layers=5), execution="graph", page_tokens=4, pool_tokens=256)
    engine.submit(list(range(3, 103)), SamplingParams(max_tokens=9), method=method("quest", budget_tokens=88))
    for _ in range(4):
        engine.step()
    with Launched() as launched:
        engine.step()
    starts = [i for i, name in enumerate(launched.names) if name.startswith("octavo.append")]
    ends = [i for i, name in enumerate(launched.names) if name.startswith("octavo.decode")]
    between = [launched.names[start + 1 : end] for start, end in zip(starts, ends, strict=True)]
    chosen = ["octavo.page_score.default", "octavo.page_topk.default"]
    assert between[:2] == [[], []] and set(chosen) < set(between[2]) and between[3:] == [chosen, chosen]
    engine.check()
