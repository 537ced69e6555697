"""Mixed precision whose loss scale is one decision for the whole model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from lightning.pytorch import LightningModule
from lightning.pytorch.plugins.precision import MixedPrecision
from torch.optim import LBFGS, Optimizer

from lightning_dist.parallel.scaler import GlobalGradScaler


class HybridMixedPrecision(MixedPrecision):
    """``16-mixed`` or ``bf16-mixed`` under any layout: autocast as on one device, and a loss scale agreed by all ranks.

    ``HybridParallelStrategy`` puts it in the place of Lightning's own plugin for ``Trainer(precision="16-mixed")``.
    Pass it by hand, ``Trainer(plugins=[HybridMixedPrecision("16-mixed", "cpu")])``, to run 16-mixed on a CPU, where
    Lightning turns the name into bf16-mixed.

    Args:
        precision: ``"16-mixed"`` or ``"bf16-mixed"``.
        device: Device type of autocast, ``"cpu"`` or ``"cuda"``.
        scaler: The loss scaling of 16-mixed; None for one with torch's usual constants.
    """

    def __init__(
        self,
        precision: Literal["16-mixed", "bf16-mixed"],
        device: str,
        scaler: GlobalGradScaler | None = None,
    ) -> None:
        if scaler is None and precision == "16-mixed":
            scaler = GlobalGradScaler()
        super().__init__(precision, device, scaler)  # type: ignore[arg-type]

    @classmethod
    def from_lightning(cls, plugin: MixedPrecision) -> HybridMixedPrecision:
        """The same settings as Lightning's plugin."""
        scaler = None
        if plugin.scaler is not None:
            scaler = GlobalGradScaler(
                plugin.scaler.get_scale(),
                plugin.scaler.get_growth_factor(),
                plugin.scaler.get_backoff_factor(),
                plugin.scaler.get_growth_interval(),
            )
        return cls(plugin.precision, plugin.device, scaler)  # type: ignore[arg-type]

    def optimizer_step(  # type: ignore[override]
        self, optimizer: Optimizer, model: LightningModule, closure: Callable[[], Any], **kwargs: Any
    ) -> Any:
        """Unscales, lets hooks and clipping see true gradients, and steps unless a gradient anywhere overflowed."""
        if self.scaler is None:
            return super().optimizer_step(optimizer, model=model, closure=closure, **kwargs)
        if isinstance(optimizer, LBFGS):
            raise ValueError("precision='16-mixed' can't be used with LBFGS, which evaluates its closure many times.")
        result = closure()
        self.scaler.unscale_(optimizer)
        self._after_closure(model, optimizer)
        step_result = self.scaler.step(optimizer, **kwargs)
        self.scaler.update()
        return step_result if not model.automatic_optimization else result
