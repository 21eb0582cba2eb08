"""A table of one's own: log p of every row, the oddest rows and why they are odd, and new rows."""

import csv
import random
from pathlib import Path

import pyarrow as pa
import torch

import xorflow as xf

path = Path("visits.csv")  # yours; here one is made: in winter people come by train
chance = random.Random(0)
with path.open("w", newline="", encoding="utf-8") as stream:
    writer = csv.writer(stream)
    writer.writerow(("season", "transport", "guests"))
    for _ in range(2000):
        season = chance.choice(("spring", "summer", "winter"))
        transport = "train" if season == "winter" else chance.choice(("car", "bicycle", "train"))
        writer.writerow((season, transport, chance.randint(1, 4)))

table = xf.data.load(path)  # a tenth of the rows validates, a tenth tests
network = xf.MADE(table.features, hidden=(64,), categories=table.categories)
base = xf.FactorisedBase(table.features, p0=0.998, categories=table.categories, learned=True)
flow = xf.LatentFlow([xf.Layer(network)], base)
result = xf.fit(flow, table, init="data", epochs=10)
print(f"test: {result['test']['nll']:.3f} nats; independent columns {result['independent_nll']:.3f}")

assert table.schema is not None
odd = pa.table({"season": ["winter"] * 2, "transport": ["bicycle", "train"], "guests": [2, 2]})
with torch.no_grad():
    # each column given those before it; their sum is log p
    by_column = flow().log_prob_by_feature(torch.tensor(table.schema.encode(odd)))
for row, log_probs in zip(odd.to_pylist(), by_column, strict=True):
    print(row, f"log p = {log_probs.sum():.2f}, by column", [round(float(value), 2) for value in log_probs])

print("new rows:", table.schema.decode(flow().sample((3,))).to_pylist())
