"""Base of the algorithms that run other algorithms. No torch at import."""

from dataclasses import replace

from algorithms.algorithm import Algorithm, Observation, Resources


class Wrapper(Algorithm):
    """Binds, teaches, moves and resets its `inner` algorithms; a subclass makes a tree of their drafts."""

    inner: tuple[Algorithm, ...] = ()

    def wrap(self, *inner: Algorithm) -> None:
        """Run these, with the target layers and cache slots that they need."""
        self.inner = inner
        self.target_layers = tuple(sorted({layer for each in inner for layer in each.target_layers}))
        self.draft_slots = max((max(each.draft_slots, each.num_nodes) for each in inner), default=0)
        self.observes_verified = any(each.observes_verified for each in inner)
        self.needs_draft_model = any(each.needs_draft_model for each in inner)

    @property
    def learns(self) -> bool:
        return any(each.learns for each in self.inner)

    def bind(self, resources: Resources) -> None:
        for each in self.inner:
            each.bind(resources)

    def observe(self, seen: Observation) -> None:
        for each in self.inner:
            features = [seen.features[self.target_layers.index(layer)] for layer in each.target_layers]
            each.observe(replace(seen, features=features))

    def reset(self) -> None:
        for each in self.inner:
            each.reset()

    def move_slot(self, source: int, target: int) -> None:
        for each in self.inner:
            each.move_slot(source, target)
