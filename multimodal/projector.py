"""From tokens of a vision tower to embeddings of a language model.

Shapes: I images, N tokens an image, W the tower's width, D the language model's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor, nn


class Projector(nn.Module):
    """[I, N, W] to [I, N', D]. ``config`` says all but the sizes and the weights; ``width`` is W, ``hidden`` D."""

    def __init__(self, config: ProjectorConfig, width: int, hidden: int) -> None:
        super().__init__()
        self.config = config
        self.width = width
        self.hidden = hidden

    def n_tokens(self, tokens: int) -> int:
        """N' for N tokens."""
        return tokens

    def pool(self, scores: Tensor) -> Tensor:
        """Scores [I, N] of the tower's tokens, as those of what becomes of them, [I, N']."""
        return scores


class ProjectorConfig(Protocol):
    def build(self, width: int, hidden: int, grid: tuple[int, int]) -> Projector:
        """A projector with fresh weights (torch's default, from the global random state) for a tower of ``width`` W
        whose tokens are a ``grid`` of rows and columns, and a language model of ``hidden`` D."""
        ...


@dataclass(frozen=True)
class LinearConfig:
    """One matrix: MiniGPT-4 (Zhu et al. 2023, arXiv 2304.10592), LLaVA (Liu et al. 2023, arXiv 2304.08485)."""

    bias: bool = True

    def build(self, width: int, hidden: int, grid: tuple[int, int]) -> Projector:
        return LinearProjector(self, width, hidden)


@dataclass(frozen=True)
class MlpConfig:
    """Two matrices with GELU between them: LLaVA-1.5 (Liu et al. 2023, arXiv 2310.03744, section 3.3).

    ``inner`` is the width between the two, D if None.
    """

    inner: int | None = None
    bias: bool = True

    def __post_init__(self) -> None:
        if self.inner is not None and self.inner < 1:
            raise ValueError(f"inner must be at least 1, got {self.inner}")

    def build(self, width: int, hidden: int, grid: tuple[int, int]) -> Projector:
        return MlpProjector(self, width, hidden)


@dataclass(frozen=True)
class PixelShuffleConfig:
    """n x n neighbouring patches become one token of n * n * W, which ``then`` projects: n * n times fewer tokens
    (Chen et al. 2024, InternVL 1.5, arXiv 2404.16821, section 3.2)."""

    n: int = 2
    then: LinearConfig | MlpConfig = MlpConfig()

    def __post_init__(self) -> None:
        if self.n < 1:
            raise ValueError(f"n must be at least 1, got {self.n}")

    def build(self, width: int, hidden: int, grid: tuple[int, int]) -> Projector:
        return PixelShuffleProjector(self, width, hidden, grid)


class LinearProjector(Projector):
    def __init__(self, config: LinearConfig, width: int, hidden: int) -> None:
        super().__init__(config, width, hidden)
        self.linear = nn.Linear(width, hidden, bias=config.bias)

    def forward(self, tokens: Tensor) -> Tensor:
        """[I, N, W] to [I, N, D]."""
        projected: Tensor = self.linear(tokens)
        return projected


class MlpProjector(Projector):
    """Parameters are named as in Hugging Face's ``multi_modal_projector``."""

    config: MlpConfig

    def __init__(self, config: MlpConfig, width: int, hidden: int) -> None:
        super().__init__(config, width, hidden)
        inner = config.inner or hidden
        self.linear_1 = nn.Linear(width, inner, bias=config.bias)
        self.linear_2 = nn.Linear(inner, hidden, bias=config.bias)

    def forward(self, tokens: Tensor) -> Tensor:
        """[I, N, W] to [I, N, D]."""
        projected: Tensor = self.linear_2(nn.functional.gelu(self.linear_1(tokens)))
        return projected


class PixelShuffleProjector(Projector):
    """::

        grid 4 x 6, n = 2               tokens 2 x 3
        a b | . . | . .
        c d | . . | . .       ->        abcd  .  .          each the n * n patches' features one after the other,
        ----+-----+----                  .    .  .          row by row
        . . | . . | . .

    Raises:
        ValueError: n does not divide both sides of the grid; on ``forward``, tokens that are not such a grid.
    """

    def __init__(self, config: PixelShuffleConfig, width: int, hidden: int, grid: tuple[int, int]) -> None:
        super().__init__(config, width, hidden)
        if grid[0] % config.n or grid[1] % config.n:
            raise ValueError(f"n={config.n} does not divide the grid of {grid[0]} x {grid[1]} patches")
        self.n = config.n
        self.grid = grid
        self.then = config.then.build(config.n**2 * width, hidden, (grid[0] // config.n, grid[1] // config.n))

    def n_tokens(self, tokens: int) -> int:
        self._require_grid(tokens)
        return tokens // self.n**2

    def forward(self, tokens: Tensor) -> Tensor:
        """[I, rows * columns, W] to [I, rows / n * columns / n, D]."""
        images, n_tokens, width = tokens.shape
        self._require_grid(n_tokens)
        (rows, columns), n = self.grid, self.n
        cells = tokens.reshape(images, rows // n, n, columns // n, n, width).transpose(2, 3)
        projected: Tensor = self.then(cells.reshape(images, n_tokens // n**2, n**2 * width))
        return projected

    def pool(self, scores: Tensor) -> Tensor:
        """The mean over the n x n patches of each token."""
        self._require_grid(scores.shape[1])
        return nn.functional.avg_pool2d(scores.unflatten(1, self.grid)[:, None], self.n).flatten(1)

    def _require_grid(self, tokens: int) -> None:
        rows, columns = self.grid
        if tokens != rows * columns:
            raise ValueError(f"pixel shuffle needs the {rows} x {columns} patches alone, got {tokens} tokens; drop CLS")
