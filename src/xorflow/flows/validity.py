r"""Which layers and bases fit together, and which conditioning sets give a normalised model.

:math:`p(x) = \sum_u p_Y(x \ominus u)\, p(u \mid x)` sums to one for every base if, from base to data, each choice's
parents can be computed before the choice is needed. Two families of models satisfy this:

* running state: layer l sees :math:`x^{(l-1)}`, strictly before d in the layer's own ordering (or the features that
  a coupling layer leaves alone), and perhaps its own u strictly before d; any ordering for each layer;
* chain: layers see the data x and earlier choices; all layers share one ordering, x and own u strictly before d, earlier
  choices up to d.
"""

from __future__ import annotations

from collections.abc import Sequence

from xorflow.bases import FactorisedBase
from xorflow.conditioners.base import Conditioner, Dependence, Source
from xorflow.errors import ModelError
from xorflow.flows.layer import Layer, LayerList

_ALLOWED = {
    Source.STATE: (Dependence.BEFORE, Dependence.COUPLED),
    Source.X: (Dependence.BEFORE,),
    Source.PREVIOUS: (Dependence.BEFORE, Dependence.UP_TO),
    Source.OWN: (Dependence.BEFORE,),
}

_WHY = {
    Source.STATE: "the running state is being computed feature by feature when the flow generates",
    Source.X: "the data are being computed feature by feature when the flow generates",
    Source.PREVIOUS: "later features of the layer before are not yet drawn when the flow generates",
    Source.OWN: "a choice cannot depend on itself or on later choices of its layer",
}


def check_fit(layers: Sequence[Layer] | LayerList, base: FactorisedBase) -> None:
    """Raise `ModelError` unless layers and base are for the same states, context, and choices that are seen."""
    if not layers:
        raise ModelError("a flow needs at least one layer, and got none")
    before = base.states  # the first layer's "previous" is the data
    for number, layer in enumerate(layers, 1):
        if layer.transform.states != base.states:
            raise ModelError(
                f"every layer works on the features and categories of the base: layer {number} has "
                f"{layer.transform.states.features} features, the base {base.features}, or their categories differ"
            )
        for network in (layer.conditioner, layer.posterior):
            if network is not None and Source.PREVIOUS in network.sees and network.choices != before:
                raise ModelError(
                    f"layer {number} sees 'previous', which needs as many choices as the layer before has (or, in "
                    "layer 1, as the data have categories), and has others; use the same transform in both"
                )
        before = layer.transform.choices
    widths = {layer.conditioner.context_features for layer in layers}
    if len(widths) > 1:
        raise ModelError(f"all layers see the same context, and these were made for widths {sorted(widths)}")


def is_chain(generators: Sequence[Conditioner]) -> bool:
    """Whether some layer sees more than the running state, so that all layers are generated feature by feature together."""
    return any(
        Source.PREVIOUS in g.sees or (Source.X in g.sees and index > 0) for index, g in enumerate(generators)
    )


def check_normalised(generators: Sequence[Conditioner]) -> None:
    """Raise `ModelError`, naming the rule, unless the model is normalised for every base."""
    for index, generator in enumerate(generators):
        for source, dependence in generator.sees.items():
            _check_input(index, source, dependence)
        if len(generator.sees) > 1 and Dependence.COUPLED in generator.sees.values():
            raise ModelError(f"layer {index + 1}: a coupling layer sees the running state alone")
    if not is_chain(generators):
        return
    if Source.PREVIOUS in generators[0].sees:
        raise ModelError(
            "layer 1 has no layer before it: it sees 'x' or 'state', strictly before d, not 'previous'"
        )
    orders = {g.order for g in generators}
    if len(orders) > 1 or None in orders:
        raise ModelError(
            "layers that see 'previous' or, beyond the first, 'x' must all share one ordering, or the model is not "
            "normalised; give every layer the same order, or let them see 'state' alone"
        )


def _check_input(index: int, source: Source, dependence: Dependence) -> None:
    if dependence not in _ALLOWED[source]:
        allowed = " or ".join(repr(str(d)) for d in _ALLOWED[source] if d is not Dependence.COUPLED)
        raise ModelError(
            f"layer {index + 1}: a generator may see {str(source)!r} {allowed} d only, and declares "
            f"{str(dependence)!r}: {_WHY[source]}, so the likelihood would not be normalised"
        )
