"""`horovod.data`: batch loaders that read ahead in a thread."""

from tfdist.horovod.data.data_loader_base import AsyncDataLoaderMixin, BaseDataLoader

__all__ = ["AsyncDataLoaderMixin", "BaseDataLoader"]
