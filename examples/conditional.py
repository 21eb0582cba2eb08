"""A conditional flow: digits given their label, trained by plain autograd, and an image's label by Bayes' rule."""

import torch

import xorflow as xf

mnist = xf.data.mnist(context="label")  # with the digit as a one-hot vector
flow = xf.LatentFlow(
    [xf.Layer(xf.MADE(784, hidden=(128,), context=10))], xf.FactorisedBase(784, p0=0.998, learned=True)
)
xf.training.init_from_data(flow, mnist.train)

optimiser, generator = torch.optim.Adam(flow.parameters(), 2e-3), torch.Generator().manual_seed(0)
for _ in range(100):
    batch = mnist.train.batch(64, generator)
    loss = -flow(batch.context).log_prob(batch.x).mean()  # as with any distribution of torch
    optimiser.zero_grad()
    loss.backward()
    optimiser.step()

assert mnist.test is not None
test = mnist.test.subset(100)
labels = torch.eye(10)
with torch.no_grad():
    log_p = torch.stack([flow(label.expand(len(test), 10)).log_prob(test.values) for label in labels], 1)
assert test.context is not None
right = (log_p.argmax(1) == test.context.argmax(1)).float().mean()
print(
    f"log p of test images given their label: {(log_p * test.context).sum(1).mean():.1f} nats; labels told: {right:.0%}"
)
print("a seven:", flow(labels[7]).sample((1,)).reshape(28, 28).sum().item(), "white pixels")
