"""Training that can be read, stopped and gone on with."""

from mirrorhead.lab.training.checkpoints import CheckpointError as CheckpointError
from mirrorhead.lab.training.loggers import Console as Console
from mirrorhead.lab.training.loggers import Event as Event
from mirrorhead.lab.training.loggers import Logger as Logger
from mirrorhead.lab.training.loggers import TensorBoard as TensorBoard
from mirrorhead.lab.training.loop import Diverged as Diverged
from mirrorhead.lab.training.loop import Outcome as Outcome
from mirrorhead.lab.training.loop import evaluate as evaluate
from mirrorhead.lab.training.loop import train as train
from mirrorhead.lab.training.optimizers import ProximalSGD as ProximalSGD
from mirrorhead.lab.training.optimizers import build_optimizer as build_optimizer
from mirrorhead.lab.training.presets import Preset as Preset
from mirrorhead.lab.training.presets import load_sets as load_sets
from mirrorhead.lab.training.presets import preset as preset
from mirrorhead.lab.training.runs import Run as Run
from mirrorhead.lab.training.runs import RunError as RunError
from mirrorhead.lab.training.runs import describe_run as describe_run
from mirrorhead.lab.training.runs import load_run as load_run
from mirrorhead.lab.training.settings import OptimizerSettings as OptimizerSettings
from mirrorhead.lab.training.settings import TrainSettings as TrainSettings
from mirrorhead.lab.training.sweeps import SweepError as SweepError
from mirrorhead.lab.training.sweeps import Tuned as Tuned
from mirrorhead.lab.training.sweeps import sweep as sweep
