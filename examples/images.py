"""Exact likelihoods of binary images, and new ones: a network that reads along the rows, mixed with one along the columns."""

import xorflow as xf

mnist = xf.data.mnist()  # bundled; binarised afresh for every training batch
features, shape = mnist.features, mnist.shape


def flow(order: str) -> xf.LatentFlow:
    network = xf.CausalTransformer(features, width=32, depth=1, heads=2, shape=shape, order=order)
    return xf.LatentFlow([xf.Layer(network)], xf.FactorisedBase(features, p0=0.998, learned=True))


by_rows, by_columns = flow("natural"), flow("columns")
for one in (by_rows, by_columns):
    xf.fit(one, mnist, init="data", epochs=1, lr=2e-3)
both = xf.Mixture([by_rows, by_columns])

assert mnist.test is not None
for name, model in {"rows": by_rows, "columns": by_columns, "both": both}.items():
    likelihood = xf.evaluate.exact(model, mnist.test)
    print(f"{name}: {likelihood.nll:.2f} ± {likelihood.stderr:.2f} nats, {likelihood.kind}")

digits = both().sample((16,))  # int64 (16, 784)
print("ink of the samples:", digits.float().mean(1).round(decimals=2).tolist())
