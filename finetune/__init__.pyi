from finetune.api import RunResult as RunResult
from finetune.api import chat as chat
from finetune.api import export_run as export_run
from finetune.api import load_recipe as load_recipe
from finetune.api import make_plan as make_plan
from finetune.api import prepare as prepare
from finetune.api import train as train
from finetune.config.schema import Recipe as Recipe
from finetune.data.batches import MicroBatch as MicroBatch
from finetune.data.batches import StepBatch as StepBatch
from finetune.errors import Preempted as Preempted
from finetune.errors import UserError as UserError
from finetune.inference.conversation import Chat as Chat
from finetune.session import Loss as Loss
from finetune.session import SampledAnswer as SampledAnswer
from finetune.session import Session as Session
from finetune.session import Update as Update
from finetune.training.callbacks import Callback as Callback
from finetune.training.callbacks import Event as Event

__version__: str

def make_callable(package: str, function: str) -> None: ...

__all__: list[str]
