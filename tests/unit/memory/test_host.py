"""A node's memory is that of all its ranks together."""

from rlhpc.memory.host import HostNeed, too_little_free

GIB = 2**30


def test_ranks_of_a_node_are_counted_together() -> None:
    enough = [HostNeed("a", 30 * GIB, 20 * GIB, 100 * GIB), HostNeed("a", 30 * GIB, 20 * GIB, 101 * GIB)]
    assert too_little_free(enough) is None
    one_more = HostNeed("b", GIB, 0, 2 * GIB)
    assert too_little_free([*enough, one_more]) is None
    assert too_little_free([*enough, HostNeed("a", 0, GIB, 100 * GIB), one_more]) == (
        "host memory of a: 3 ranks together take 60 GiB for the trainer's state while the engine generates and "
        "41 GiB for copies of what a save has not written yet, 100 GiB are free; give the job more "
        "(cluster.memory_gib_per_node), or let parts stay on the GPU "
        "(actor_rollout_ref.actor.megatron.{param,optimizer}_offload=false), or set checkpoint.async_save=false"
    )
    assert too_little_free([HostNeed("c", 0, 2 * GIB, GIB)]) == (
        "host memory of c: its rank takes 2 GiB for copies of what a save has not written yet, 1 GiB are free; "
        "give the job more (cluster.memory_gib_per_node), or set checkpoint.async_save=false"
    )
