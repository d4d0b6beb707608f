#!/usr/bin/env python3
"""Prints what TensorBoard itself reads from a run's event files.

usage: read_tensorboard.py RUN_DIR/tensorboard

Prints one JSON object: {"version": TensorBoard's, "scalars": {tag: [[step, value], ...]}, "texts": {tag: [[step,
text], ...]}, "descriptions": {tag: text}, "layout": {category: {chart: [tag, ...]}}, "hparams": {key: value}}. A value that is not finite is
null. Nothing is sampled. Only the steps that a resumed run wrote again are dropped, by TensorBoard itself.

Needs the package tensorboard (scripts/setup_python.sh).
"""

import json
import math
import pathlib
import sys

import tensorboard.version
from tensorboard.backend.event_processing import event_accumulator
from tensorboard.plugins.custom_scalar import layout_pb2
from tensorboard.plugins.custom_scalar import metadata as custom_scalars
from tensorboard.plugins.hparams import metadata as hparams
from tensorboard.util import tensor_util

KEEP_ALL = {event_accumulator.SCALARS: 0, event_accumulator.TENSORS: 0}


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    folder = pathlib.Path(sys.argv[1])
    if not folder.is_dir():
        sys.exit(f"error: {folder} is not a folder")
    events = event_accumulator.EventAccumulator(str(folder), size_guidance=KEEP_ALL)
    events.Reload()
    tags = events.Tags()
    scalars = {
        tag: [[point.step, point.value if math.isfinite(point.value) else None] for point in events.Scalars(tag)]
        for tag in tags[event_accumulator.SCALARS]
    }
    texts = {
        tag: [[point.step, tensor_util.make_ndarray(point.tensor_proto)[0].decode()] for point in events.Tensors(tag)]
        for tag in tags[event_accumulator.TENSORS]
        if events.SummaryMetadata(tag).plugin_data.plugin_name == "text"
    }
    descriptions = {tag: events.SummaryMetadata(tag).summary_description for tag in scalars}
    layout = layout_pb2.Layout()
    if custom_scalars.CONFIG_SUMMARY_TAG in tags[event_accumulator.TENSORS]:
        layout.ParseFromString(events.Tensors(custom_scalars.CONFIG_SUMMARY_TAG)[0].tensor_proto.string_val[0])
    charts = {
        category.title: {chart.title: list(chart.multiline.tag) for chart in category.chart}
        for category in layout.category
    }
    keys = {}
    if hparams.SESSION_START_INFO_TAG in tags[event_accumulator.TENSORS]:
        content = events.SummaryMetadata(hparams.SESSION_START_INFO_TAG).plugin_data.content
        keys = {key: getattr(value, value.WhichOneof("kind"))
                for key, value in hparams.parse_session_start_info_plugin_data(content).hparams.items()}
    read = {"scalars": scalars, "texts": texts, "descriptions": descriptions, "layout": charts, "hparams": keys}
    print(json.dumps({"version": tensorboard.version.VERSION, **read}))


if __name__ == "__main__":
    main()
