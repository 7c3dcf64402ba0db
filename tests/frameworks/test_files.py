"""The files of a run load with the frameworks' own loaders, tensor by tensor."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch
import peft
import pytest
import torch
from cli_cases import Narrows
from frameworks import lab
from run_cases import broker
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import LlamaForCausalLM

from narrows.learner import Learner

pytestmark = [pytest.mark.real, pytest.mark.filterwarnings("ignore")]


@pytest.fixture
def trained(narrows: Narrows, tmp_path: Path) -> Callable[[Callable[[], nn.Module]], Any]:
    """Trains a model to the end of a run, with a plain loop; the folder then has own.safetensors,
    of the learner, and global.safetensors, of the broker."""

    def train(make_model: Callable[[], nn.Module]) -> Any:
        model: Any = make_model()
        weights = [each for each in model.parameters() if each.requires_grad]
        optimizer = torch.optim.AdamW(weights, lr=1e-2)
        rows = lab.Rows(lab.BATCH).ids
        with broker(tmp_path, run__goal_tokens=5000) as run:
            with Learner(model, optimizer, broker=run.address, name="ours") as learner:
                while not learner.should_stop:
                    loss = model(input_ids=rows, labels=rows).loss
                    loss.backward()
                    learner.log(tokens=rows.numel(), loss=loss)
                    optimizer.step()
                    optimizer.zero_grad()
            learner.save("own.safetensors")
        assert narrows.run("export", str(tmp_path / "state"), "--to", "global.safetensors") == 0
        return model

    return train


def equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return bool(one) and all(each.equal(other[name]) for name, each in one.items())


@pytest.mark.parametrize("make_model", [lab.llama, lab.tied_llama])
def test_the_files_of_a_whole_model_load_with_from_pretrained(
    trained: Any, tmp_path: Path, make_model: Callable[[], nn.Module]
) -> None:
    model = trained(make_model)
    for file in ("own", "global"):
        folder = tmp_path / file
        model.config.save_pretrained(folder)
        shutil.copy(f"{file}.safetensors", folder / "model.safetensors")
        loaded, told = LlamaForCausalLM.from_pretrained(folder, output_loading_info=True)
        assert not any(told.values()), told
        assert equal(load_file(f"{file}.safetensors"), loaded.state_dict())
        if file == "own":
            assert equal(model.state_dict(), loaded.state_dict())
    model.save_pretrained(tmp_path / "whole")
    whole = LlamaForCausalLM.from_pretrained(tmp_path / "whole")
    assert equal(model.state_dict(), whole.state_dict())


def test_the_files_of_adapters_load_with_peft(trained: Any, tmp_path: Path) -> None:
    model = trained(lab.adapted_llama)

    def adapters(folder: Path) -> dict[str, Tensor]:
        with_adapters = peft.PeftModel.from_pretrained(lab.llama(), folder)
        return {name: each for name, each in with_adapters.state_dict().items() if "lora_" in name}

    exported = load_file("global.safetensors")
    assert all("lora_" in name for name in exported), "what trains alone"
    for file in ("own", "global"):
        folder = tmp_path / file
        model.peft_config["default"].save_pretrained(folder)
        shutil.copy(f"{file}.safetensors", folder / "adapter_model.safetensors")
        assert equal(adapters(folder), load_file(f"{file}.safetensors"))
    model.save_pretrained(tmp_path / "whole")
    assert equal(adapters(tmp_path / "whole"), load_file("own.safetensors"))


class Module(lightning.pytorch.LightningModule):
    """Lightning's checkpoints name its class."""

    def __init__(self) -> None:
        super().__init__()
        self.model = lab.Toy()

    def forward(self, input_ids: Tensor, labels: Tensor) -> Any:
        return self.model(input_ids, labels)


def test_a_checkpoint_of_lightning_and_a_saved_model_hold_the_same(
    trained: Any, tmp_path: Path
) -> None:
    module = trained(Module)
    trainer = lightning.pytorch.Trainer(
        accelerator="cpu", devices=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.strategy.connect(module)
    trainer.save_checkpoint("last.ckpt")
    loaded = Module.load_from_checkpoint("last.ckpt")
    assert equal(module.state_dict(), loaded.state_dict())
    assert equal(load_file("own.safetensors"), loaded.state_dict())
    assert equal(Module().state_dict(), loaded.state_dict()) is False
    module.load_state_dict(load_file("global.safetensors"))
