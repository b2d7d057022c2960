"""Eager and lazy seeding give the same numbers, however user code references the functions.

A process shares its generators, and lazy seeding replaces functions of modules: each case runs in a new interpreter.
"""

import random
from types import ModuleType

import numpy as np
import pytest

from infeed.workers.rng import lent_generators, seed_generators
from tests.unit.fresh import run_fresh

# Each runs after seeding with 7, once lazily and once eagerly. "before" runs before lazy seeding starts.
DRAWS = {
    "random": "random.random(), random.randint(0, 99), random.choice('abcdef')",
    "shuffle": "(lambda x: (random.shuffle(x), x))(list(range(9)))",
    "gauss": "random.gauss(), random.gauss()",
    "getstate": "random.getstate()[1][:4], random.getstate()[2]",
    "numpy": "np.random.rand(3).tolist(), np.random.randint(0, 9, 4).tolist(), np.random.permutation(5).tolist()",
    "numpy normal": "np.random.normal(), np.random.randn(2).tolist()",
    "numpy generator": "np.random.mtrand._rand.rand(2).tolist()",
    "numpy generator's state": "np.random.mtrand._rand.get_state()[1][:4].tolist()",
    "numpy state": "np.random.get_state()[1][:4].tolist()",
    "numpy seeded by the user": "(np.random.seed(3), np.random.rand())[1]",
    "seeded by the user": "(random.seed(3), random.random())[1]",
    "state set by the user": "(random.setstate(random.Random(4).getstate()), random.random())[1]",
    "numpy state set by the user": "(np.random.set_state(np.random.RandomState(4).get_state()), np.random.rand())[1]",
    "user's own generator": "random.Random(5).random(), np.random.RandomState(5).rand()",
    "both": "random.random(), np.random.rand(), random.random(), np.random.rand()",
    "sklearn's way": "isinstance(np.random.mtrand._rand, np.random.RandomState), np.random.mtrand._rand.choice(9, 3).tolist()",
}
BEFORE = {
    "held from before": ("from random import random as draw", "draw(), draw(), random.random()"),
    "numpy held from before": ("from numpy.random import rand as draw", "draw(), np.random.rand()"),
    "generator held from before": ("generator = np.random.mtrand._rand", "generator.rand(), np.random.rand()"),
}
SETUP = """
import random
import numpy as np
from infeed.workers.rng import seed_generators, seed_lazily
"""


def drawn(expression: str, *, is_lazy: bool, before: str = "", after: str = "") -> str:
    return run_fresh(
        f"{SETUP}\n{before}\n{'seed_lazily()' if is_lazy else ''}\n{after}\n"
        "random.random(); random.gauss(); np.random.rand(); np.random.randn()\n"
        f"seed_generators(7)\nprint({expression})\nseed_generators(7)\nprint({expression})\n"
    )


@pytest.mark.process
def test_lazy_and_eager_seeding_give_the_same_numbers() -> None:
    """For every function, and also on the second seeding with the same seed: gauss keeps no value."""
    everything = "{" + ", ".join(f"{name!r}: ({draw})" for name, draw in DRAWS.items() if "user" not in name) + "}"

    lazy, eager = drawn(everything, is_lazy=True), drawn(everything, is_lazy=False)

    assert lazy == eager
    first, second = lazy.splitlines()
    assert first == second


@pytest.mark.process
@pytest.mark.parametrize("name", [name for name in DRAWS if "user" in name])
def test_the_users_own_seed_has_precedence(name: str) -> None:
    """They draw from it as without infeed."""
    lazy = drawn(DRAWS[name], is_lazy=True)

    assert lazy == drawn(DRAWS[name], is_lazy=False)


KEPT = """
from infeed.workers.rng import keep_user_seeds, seed_worker
seed_lazily()
seed_worker(7)
{seeds}
keep_user_seeds(7)
before = random.random(), np.random.rand()
seed_generators(8)
print(random.random() != random.Random(8).random(), np.random.rand() != np.random.RandomState(8).rand())
seed_worker(9)
print(random.random() == random.Random(9).random(), np.random.rand() == np.random.RandomState(9).rand())
"""


@pytest.mark.process
@pytest.mark.parametrize(
    ("seeds", "kept"),
    [
        ("random.seed(1); np.random.seed(1)", "True True"),
        ("random.seed('a'); np.random.seed([1, 2])", "True True"),
        ("random.setstate(random.getstate()); np.random.set_state(np.random.get_state())", "True True"),
        ("random.seed(7); np.random.seed(7)", "False False"),  # The worker's own seed.
        ("random.seed(); np.random.seed()", "False False"),
        ("random.random(); np.random.rand()", "False False"),
        ("np.random.seed(3)", "False True"),
    ],
)
def test_a_generator_that_is_already_seeded_is_not_seeded_again(seeds: str, kept: str) -> None:
    """Until the process works for another loader."""
    assert run_fresh(SETUP + KEPT.format(seeds=seeds)).splitlines() == [kept, "True True"]


@pytest.mark.process
@pytest.mark.parametrize("name", ["numpy seeded by the user", "seeded by the user"])
def test_a_seed_of_the_user_is_not_overwritten(name: str) -> None:
    """infeed's seed is dropped as soon as the user sets one, even if nothing was drawn before."""
    plain = run_fresh(f"import random\nimport numpy as np\nprint({DRAWS[name]})\nprint({DRAWS[name]})")

    assert drawn(DRAWS[name], is_lazy=True) == plain


@pytest.mark.process
def test_functions_imported_by_name_are_seeded_too() -> None:
    """``from random import random`` references the lazy wrapper, and draws the same numbers, grain after grain."""
    after = "from random import random as draw, shuffle\nfrom numpy.random import rand, randint"
    expression = "draw(), random.random(), draw(), rand(), np.random.rand(), int(randint(99))"

    lazy = drawn(expression, is_lazy=True, after=after)

    assert lazy == drawn(expression, is_lazy=False, after=after)
    assert len(set(lazy.splitlines())) == 1


@pytest.mark.process
@pytest.mark.parametrize("name", BEFORE)
def test_earlier_references_draw_from_the_same_generator(name: str) -> None:
    """Modules imported before lazy seeding see generators that the first lazy draw has seeded."""
    before, expression = BEFORE[name]
    lazy = drawn(f"random.random(), np.random.rand(), {expression}", is_lazy=True, before=before)

    assert lazy == drawn(f"random.random(), np.random.rand(), {expression}", is_lazy=False, before=before)


@pytest.mark.process
def test_grains_without_draws_cost_nothing_and_change_nothing() -> None:
    """Only the last seed counts, and it is set at the first draw."""
    code = f"""{SETUP}
seed_lazily()
for seed in range(100):
    seed_generators(seed)
print(random.random(), np.random.rand())
"""
    random_numbers = random.Random(99).random(), np.random.RandomState(99).rand()

    assert run_fresh(code) == f"{random_numbers[0]} {random_numbers[1]}"


@pytest.mark.process
@pytest.mark.torch
def test_torch_is_seeded_with_the_others() -> None:
    """As with torch.manual_seed, for the whole range of seeds."""
    pytest.importorskip("torch")
    code = f"""{SETUP}
import torch
for seed in (0, 7, (1 << 64) - 1):
    seed_generators(seed)
    found = torch.rand(2).tolist()
    torch.manual_seed(seed)
    assert found == torch.rand(2).tolist(), seed
"""
    run_fresh(code)


@pytest.mark.parametrize("seed", [0, 1, 1 << 32, (1 << 64) - 1], ids=["0", "1", "33 bits", "64 bits"])
def test_any_seed_is_accepted_and_gives_different_numbers(seed: int) -> None:
    """NumPy's legacy generator takes only 32 bits; a longer seed is no error."""
    with lent_generators():
        seed_generators(seed)
        first = random.random(), float(np.random.rand())
        seed_generators(seed)
        again = random.random(), float(np.random.rand())
        seed_generators(seed ^ 1)
        other = random.random(), float(np.random.rand())

    assert first == again
    assert first[0] != other[0]
    assert first[1] != other[1]


def test_seeds_are_those_of_python_and_numpy() -> None:
    """Users who seed their own generators with the number get the same sequence."""
    with lent_generators():
        seed_generators(1234)

        assert random.random() == random.Random(1234).random()
        assert np.random.rand() == np.random.RandomState(1234).rand()


def test_generators_are_restored_after_use() -> None:
    """Also the value that gauss keeps, and after an exception: the user's process is unchanged."""
    random.gauss()
    np.random.randn()
    before = random.getstate(), repr(np.random.get_state())

    def draw_and_fail() -> None:
        with lent_generators():
            seed_generators(5)
            random.gauss()
            np.random.randn(3)
            raise KeyError("user code")

    with pytest.raises(KeyError):
        draw_and_fail()

    assert (random.getstate(), repr(np.random.get_state())) == before


@pytest.mark.torch
def test_torchs_generator_is_restored_too(torch: ModuleType) -> None:
    """Its state is a tensor; equal before and after."""
    before = torch.default_generator.get_state()
    with lent_generators():
        seed_generators(5)
        torch.rand(10)

    assert torch.equal(torch.default_generator.get_state(), before)
