"""The effect of each setting of a crossed sweep, averaged over all the others.

A sweep that crosses its axes (``cells`` and the lines of ``grid``) allows more than a comparison of its cells
one by one: two values of an axis are compared over all pairs of cells that differ in that axis alone. For
each seed the differences of the pairs are averaged, and these averages are tested like the differences of two
cells. So the sample size is the number of seeds, not of pairs, and averaging reduces the noise of single
runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from common.errors import require
from launch.collect import Cell
from launch.grid import Sweep
from reports.statistics import Comparison, with_holm

Coordinates = tuple[str, ...]
"""A cell's value on each axis."""


@dataclass(frozen=True)
class Crossing:
    """The cells of a crossed sweep. ``values``: coordinates -> seed -> value, for cells that have every
    seed."""

    axes: Mapping[str, tuple[str, ...]]
    values: Mapping[Coordinates, Mapping[int, float]]

    @classmethod
    def of(cls, sweep: Sweep, cells: Sequence[Cell], metric: str) -> Crossing:
        """Make the crossing of a sweep's cells; cells with a run that is not finished or lacks the metric are
        left out. Raises ConfigError if no two axes are crossed."""
        axes = sweep.axes
        many = [name for name, values in axes.items() if len(values) > 1]
        require(len(many) > 1, "--effects", sweep.name, f"needs two axes that are crossed; has {many}")
        require(not sweep.select, "--effects", sweep.name, "is a sweep that chooses among its settings")
        where = sweep.coordinates
        cell_values = {where[cell.name]: cell.values(metric) for cell in cells if cell.name in where}
        whole = {at: values for at, values in cell_values.items() if len(values) == len(sweep.seeds)}
        return cls(axes, whole)

    def effects(self, within: str | None = None) -> list[Comparison]:
        """Compare each value of each axis with the axis' first by a paired t-test over seeds, with Holm's
        correction over all of them. ``within``: an axis; the others are compared separately for each of its
        values. Raises ConfigError."""
        require(within is None or within in self.axes, "--within", within, f"is no axis: {list(self.axes)}")
        places: tuple[str | None, ...] = (None,) if within is None else self.axes[within]
        axes = [axis for axis in self.axes if axis != within]
        return with_holm(pair for at in places for axis in axes for pair in self._of_axis(axis, within, at))

    def _of_axis(
        self, axis: str, within: str | None, where: str | None
    ) -> Iterator[tuple[str, str, list[float]]]:
        names = list(self.axes)
        at, fixed = names.index(axis), None if within is None else names.index(within)
        first, *others = self.axes[axis]
        for value in others:
            pairs = [
                (self.values[cell], self.values[other])
                for cell in self.values
                if cell[at] == first and (fixed is None or cell[fixed] == where)
                if (other := (*cell[:at], value, *cell[at + 1 :])) in self.values
            ]
            begin = "" if where is None else f"{where}: "
            yield f"{first} ({len(pairs)})", f"{begin}{value}", by_seed(pairs)

    def means(self, within: str | None = None) -> list[list[str]]:
        """Return a heading, then a row for each value of each axis with the mean over its cells and seeds.
        ``within``: an axis; there is a column for each of its values."""
        names = list(self.axes)
        columns: tuple[str | None, ...] = (None,) if within is None else self.axes[within]
        table = [["axis", "value", *("all cells" if column is None else column for column in columns)]]
        means = [(dict(zip(names, at, strict=True)), fmean(of.values())) for at, of in self.values.items()]
        for axis in (name for name in names if name != within and len(self.axes[name]) > 1):
            for value in self.axes[axis]:
                row = [axis, value]
                for column in columns:
                    some = [
                        m for at, m in means if at[axis] == value and column in (None, at.get(str(within)))
                    ]
                    row.append(f"{fmean(some):.4g} ({len(some)})" if some else "–")
                table.append(row)
        return table


def by_seed(pairs: Sequence[tuple[Mapping[int, float], Mapping[int, float]]]) -> list[float]:
    """Return, for each seed, the mean difference over the pairs; empty without pairs."""
    seeds = sorted(set.intersection(*(a.keys() & b.keys() for a, b in pairs))) if pairs else []
    return [fmean(b[seed] - a[seed] for a, b in pairs) for seed in seeds]
