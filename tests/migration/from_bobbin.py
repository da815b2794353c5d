"""What bobbin gives for rows of ``docs/from_bobbin.md``: by its documents and its tests."""

from tests.migration import Checks

checks = Checks()


@checks.of('tpmap(lambda x: x.sum(), "batch", ("shard",), devices=2)(torch.arange(4.0))')
def _(names, value):
    assert value.tolist() == [1.0, 5.0]  # 0 + 1, 2 + 3


@checks.of("list(SampledSet(10).add(1).union([2, 3]))")
def _(names, value):
    assert sorted(value) == [1, 2, 3]


@checks.of('total_dimensionality({"a": torch.ones(2, 3)})')
def _(names, value):
    assert value == 6


@checks.of('unshard({"a": torch.ones(2, 3)})')
def _(names, value):
    assert [shard["a"].tolist() for shard in value] == [[1.0] * 3] * 2  # a list of shards, to be reduced


@checks.of('split_leading_axis(2, {"a": torch.ones(4, 3)})')
def _(names, value):
    assert value["a"].shape == (2, 2, 3)


@checks.of('flatten_leading_axes({"a": torch.ones(2, 2, 3)})')
def _(names, value):
    assert value["a"].shape == (4, 3)


@checks.of("Accuracy(3, 4).reduce(Accuracy(1, 4))")
def _(names, value):
    assert (value.hits, value.n) == (4, 8)


@checks.of('gather_from_jax_processes({"w": torch.ones(2)})')
def _(names, value):
    assert [tree["w"].tolist() for tree in value] == [[1.0, 1.0]]


@checks.of("""parse_pytree_json('{"a": 1}', {"a": 0})""")
def _(names, value):
    assert value == {"a": 1}
