"""Train with JAX: batches arrive as JAX arrays, on JAX's default device. torch is not needed.

pip install "infeed[jax]"
python jax_training.py
"""

import jax
import jax.numpy as jnp
import numpy as np

import infeed


class Points:
    def __len__(self) -> int:
        return 512

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        x = np.array([index / 512], dtype=np.float32)
        return x, 3 * x + 1 + 0.01 * infeed.get_rng().standard_normal(1, dtype=np.float32)


@jax.jit
def step(weights: dict[str, jax.Array], x: jax.Array, y: jax.Array) -> tuple[dict[str, jax.Array], jax.Array]:
    def loss(weights: dict[str, jax.Array]) -> jax.Array:
        return jnp.mean((x * weights["slope"] + weights["shift"] - y) ** 2)

    value, slopes = jax.value_and_grad(loss)(weights)
    return jax.tree.map(lambda weight, slope: weight - 0.3 * slope, weights, slopes), value


weights = {"slope": jnp.zeros(()), "shift": jnp.zeros(())}
with infeed.DataLoader(
    Points(), batch_size=32, shuffle=True, seed=0, num_workers=2, device=infeed.Device(output="jax")
) as loader:
    for epoch in range(4):
        for x, y in loader:
            assert isinstance(x, jax.Array)
            weights, value = step(weights, x, y)
        print(f"epoch {epoch}: loss {value:.4f}")
print(f"y = {weights['slope']:.1f} x + {weights['shift']:.1f}")
