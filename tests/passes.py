"""Who took part in the averages of a rank under test."""

from ring_plugins.core.gradients.reducer import Fill, GradientReducer


def members_of_passes() -> list[tuple[int, ...]]:
    """A list that gets the members at the end of each pass.

    `world_ranks` after `backward()` may lack some of them: the same backward may go on to find that they died later.
    """
    passes: list[tuple[int, ...]] = []
    finish = GradientReducer.finish

    def logged(reducer: GradientReducer, fill: Fill) -> None:
        finish(reducer, fill)
        passes.append(reducer._communicator.ranks)

    GradientReducer.finish = logged  # type: ignore[method-assign]
    return passes
