"""Training that can be read, stopped and gone on with."""

from mirrorhead.training.checkpoints import CheckpointError as CheckpointError
from mirrorhead.training.loggers import Console as Console
from mirrorhead.training.loggers import Event as Event
from mirrorhead.training.loggers import Logger as Logger
from mirrorhead.training.loggers import TensorBoard as TensorBoard
from mirrorhead.training.loop import Diverged as Diverged
from mirrorhead.training.loop import Outcome as Outcome
from mirrorhead.training.loop import evaluate as evaluate
from mirrorhead.training.loop import train as train
from mirrorhead.training.optimizers import ProximalSGD as ProximalSGD
from mirrorhead.training.optimizers import build_optimizer as build_optimizer
from mirrorhead.training.presets import Preset as Preset
from mirrorhead.training.presets import load_sets as load_sets
from mirrorhead.training.presets import preset as preset
from mirrorhead.training.runs import Run as Run
from mirrorhead.training.runs import RunError as RunError
from mirrorhead.training.runs import describe_run as describe_run
from mirrorhead.training.runs import load_run as load_run
from mirrorhead.training.settings import OptimizerSettings as OptimizerSettings
from mirrorhead.training.settings import TrainSettings as TrainSettings
from mirrorhead.training.sweeps import SweepError as SweepError
from mirrorhead.training.sweeps import Tuned as Tuned
from mirrorhead.training.sweeps import sweep as sweep
