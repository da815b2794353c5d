"""Names and arguments of bobbin: tasks, tables of actions, trees and writers, on this package."""

from collections.abc import Callable, Iterable
from typing import Any

from fluxutils_py.bobbin.crontab import CronTab
from fluxutils_py.bobbin.evaluation import (
    EvalResults,
    EvalTask,
    KeepBestResults,
    RunEval,
    RunEvalKeepBest,
    SampledSet,
    assert_replica_integrity,
    eval_batches,
    eval_datasets,
    gather_from_jax_processes,
    gather_from_processes,
)
from fluxutils_py.bobbin.summaries import (
    ImageSummary,
    MplImageSummary,
    PublishTrainingProgress,
    ScalarSummary,
    collected_summaries,
    publish_train_intermediates,
    publish_trainer_env_info,
    sow,
)
from fluxutils_py.bobbin.tpmap import tpmap
from fluxutils_py.bobbin.train_task import (
    BaseTrainTask,
    TaskStep,
    TrainTask,
    initialize_train_state,
)
from fluxutils_py.bobbin.treejson import (
    dump_pytree_json,
    parse_pytree_json,
    read_pytree_json_file,
    write_pytree_json_file,
)
from fluxutils_py.bobbin.writers import (
    MultiDirectorySummaryWriter,
    NullSummaryWriter,
    SummaryWriter,
    ThreadedSummaryWriter,
)
from fluxutils_py.training import Checkpointer, EveryNSteps, Loop, StepInfo, TrainState, Trigger
from fluxutils_py.training.triggers import (
    AtFirstNSteps,
    AtNthStep,
    ForEachNSteps,
    ForEachTSeconds,
    OrTrigger,
)
from fluxutils_py.tree import (
    flatten_leading_axes,
    flatten_with_paths,
    nested_vars_to_paths,
    split_leading_axis,
    summarize_shape,
    total_dimensionality,
    unshard,
)

# their names in 0.2.0
read_pytree_json = read_pytree_json_file
write_pytree_json = write_pytree_json_file

# bobbin's names of types
Batch = Any
BatchGen = Callable[[], Iterable[Batch]]
Parameter = Any
VarCollection = dict[str, Any]

__all__ = [
    "AtFirstNSteps",
    "AtNthStep",
    "BaseTrainTask",
    "Checkpointer",
    "CronTab",
    "EvalResults",
    "EvalTask",
    "EveryNSteps",
    "ForEachNSteps",
    "ForEachTSeconds",
    "ImageSummary",
    "KeepBestResults",
    "Loop",
    "MplImageSummary",
    "MultiDirectorySummaryWriter",
    "NullSummaryWriter",
    "OrTrigger",
    "PublishTrainingProgress",
    "RunEval",
    "RunEvalKeepBest",
    "SampledSet",
    "ScalarSummary",
    "StepInfo",
    "SummaryWriter",
    "TaskStep",
    "ThreadedSummaryWriter",
    "TrainState",
    "TrainTask",
    "Trigger",
    "assert_replica_integrity",
    "collected_summaries",
    "dump_pytree_json",
    "eval_batches",
    "eval_datasets",
    "flatten_leading_axes",
    "flatten_with_paths",
    "gather_from_jax_processes",
    "gather_from_processes",
    "initialize_train_state",
    "nested_vars_to_paths",
    "parse_pytree_json",
    "publish_train_intermediates",
    "publish_trainer_env_info",
    "read_pytree_json_file",
    "sow",
    "split_leading_axis",
    "summarize_shape",
    "total_dimensionality",
    "tpmap",
    "unshard",
    "write_pytree_json_file",
]
