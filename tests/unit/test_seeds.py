"""Seeds: a pure function of the position, the same for integers and arrays."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from infeed.plan.seeds import derive, mix, mix_array

WORDS = st.integers(0, (1 << 64) - 1)


@given(st.lists(WORDS, min_size=1, max_size=20))
def test_mixing_an_array_mixes_each_element(values: list[int]) -> None:
    """Both forms give the same numbers."""
    assert mix_array(np.array(values, dtype=np.uint64)).tolist() == [mix(value) for value in values]


def test_mixing_does_not_change_its_argument() -> None:
    """The given array is not written to."""
    values = np.arange(4, dtype=np.uint64)

    mix_array(values)

    assert values.tolist() == [0, 1, 2, 3]


def test_mix_is_the_finaliser_of_splitmix64() -> None:
    """The numbers are pinned: they decide every order and every seed, on every platform and in every release."""
    # The first published outputs of splitmix64 from state 0.
    golden = 0x9E3779B97F4A7C15
    assert [mix(golden * step % (1 << 64)) for step in range(3)] == [
        0xE220A8397B1DCDAF,
        0x6E789E6AA1B965F4,
        0x06C45D188009454F,
    ]


def test_neighboring_values_differ_in_about_half_of_the_bits() -> None:
    """Seeds of neighboring positions are unrelated."""
    flips = [(mix(value) ^ mix(value + 1)).bit_count() for value in range(1000)]

    assert 30 < sum(flips) / len(flips) < 34


@given(st.lists(WORDS, min_size=1, max_size=5), st.data())
def test_every_argument_counts(place: list[int], data: st.DataObject) -> None:
    """Another seed, epoch or position gives another result."""
    at = data.draw(st.integers(0, len(place) - 1))
    other = [*place]
    other[at] = data.draw(WORDS.filter(lambda value: value != place[at]))

    assert derive(*place) != derive(*other)


@pytest.mark.parametrize(
    ("one", "other"),
    [((1, 2, 3), (1, 3, 2)), ((1, 2), (1, 2, 0)), ((1, 2), (2, 1)), ((0,), (0, 0)), ((5,), (-5,))],
    ids=["order of the path", "length of the path", "seed and epoch", "nothing and zero", "sign"],
)
def test_similar_arguments_have_different_seeds(one: tuple[int, ...], other: tuple[int, ...]) -> None:
    """Order and number of arguments matter."""
    assert derive(*one) != derive(*other)


@given(st.integers(), st.lists(st.integers(), max_size=3))
def test_a_seed_is_a_64_bit_number_for_any_integer(seed: int, path: list[int]) -> None:
    """Negative and huge integers are accepted as well."""
    assert 0 <= derive(seed, *path) < 1 << 64
