"""Training that resumes where it was stopped: presets, the loop, checkpoints, sweeps."""

from mirrorhead.lab.runtime.errors import Diverged as Diverged
from mirrorhead.lab.runtime.errors import RunError as RunError
from mirrorhead.lab.runtime.errors import SweepError as SweepError
from mirrorhead.lab.training.loggers import Console as Console
from mirrorhead.lab.training.loggers import Event as Event
from mirrorhead.lab.training.loggers import Logger as Logger
from mirrorhead.lab.training.loggers import TensorBoard as TensorBoard
from mirrorhead.lab.training.loop import complete_run as complete_run
from mirrorhead.lab.training.loop import evaluate as evaluate
from mirrorhead.lab.training.loop import train as train
from mirrorhead.lab.training.presets import Preset as Preset
from mirrorhead.lab.training.presets import load_sets as load_sets
from mirrorhead.lab.training.presets import preset as preset
from mirrorhead.lab.training.run_folder import Outcome as Outcome
from mirrorhead.lab.training.run_folder import Run as Run
from mirrorhead.lab.training.run_folder import describe_run as describe_run
from mirrorhead.lab.training.run_folder import load_run as load_run
from mirrorhead.lab.training.settings import OptimizerSettings as OptimizerSettings
from mirrorhead.lab.training.settings import ProximalSGD as ProximalSGD
from mirrorhead.lab.training.settings import TrainSettings as TrainSettings
from mirrorhead.lab.training.settings import build_optimizer as build_optimizer
from mirrorhead.lab.training.sweeps import Tuned as Tuned
from mirrorhead.lab.training.sweeps import sweep as sweep
