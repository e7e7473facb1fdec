"""Training that resumes where it was stopped: presets, the loop, checkpoints."""

from mirrorhead_lab.runtime.errors import Diverged as Diverged
from mirrorhead_lab.runtime.errors import RunError as RunError
from mirrorhead_lab.runtime.errors import SweepError as SweepError
from mirrorhead_lab.training.classification import complete_run as complete_run
from mirrorhead_lab.training.classification import evaluate as evaluate
from mirrorhead_lab.training.classification import train as train
from mirrorhead_lab.training.loggers import Console as Console
from mirrorhead_lab.training.loggers import Event as Event
from mirrorhead_lab.training.loggers import Logger as Logger
from mirrorhead_lab.training.loggers import TensorBoard as TensorBoard
from mirrorhead_lab.training.presets import Preset as Preset
from mirrorhead_lab.training.presets import load_sets as load_sets
from mirrorhead_lab.training.presets import preset as preset
from mirrorhead_lab.training.run_folder import Outcome as Outcome
from mirrorhead_lab.training.run_folder import Run as Run
from mirrorhead_lab.training.run_folder import describe_run as describe_run
from mirrorhead_lab.training.run_folder import load_run as load_run
from mirrorhead_lab.training.settings import OptimizerSettings as OptimizerSettings
from mirrorhead_lab.training.settings import ProximalSGD as ProximalSGD
from mirrorhead_lab.training.settings import TrainSettings as TrainSettings
from mirrorhead_lab.training.settings import build_optimizer as build_optimizer
