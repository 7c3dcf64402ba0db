"""Keras on torch: its optimizer is none of torch's, so a callback makes the boundary."""

import os
from pathlib import Path
from typing import Any

os.environ["KERAS_BACKEND"] = "torch"

import keras
import pytest
import torch
from frameworks import lab
from run_cases import broker

from narrows.learner import Learner, LocalProtocolError

pytestmark = pytest.mark.real


def test_a_callback_of_ten_lines_trains_in_a_run(tmp_path: Path) -> None:
    layers = [keras.layers.Embedding(lab.VOCABULARY, 16), keras.layers.Dense(lab.VOCABULARY)]
    model = keras.Sequential(layers)
    model.build((None, lab.POSITIONS))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer=keras.optimizers.AdamW(1e-3), loss=loss)

    class Boundary(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            learner.log(tokens=lab.STEP_TOKENS, loss=logs["loss"])
            learner.step()
            self.model.stop_training = learner.should_stop

    rows = lab.Rows(lab.BATCH * 1000).ids
    before = [each.detach().clone() for each in model.parameters()]
    with broker(tmp_path, run__goal_tokens=20_000) as run:
        with pytest.raises(LocalProtocolError, match=r"expected a torch\.optim\.Optimizer"):
            Learner(model, model.optimizer, broker=run.address, name="ours")
        # It steps nothing. A learner wants to know the parameters that are trained.
        names = torch.optim.SGD(model.parameters(), lr=0.0)
        with Learner(model, names, broker=run.address, name="ours", boundary="manual") as learner:
            model.fit(rows, rows, batch_size=lab.BATCH, verbose=0, callbacks=[Boundary()])
        steps = learner.stats()["steps"]
    assert 20_000 / lab.STEP_TOKENS <= steps < 1000 and learner.health == "final"
    assert not any(one.equal(other) for one, other in zip(before, model.parameters(), strict=True))
