"""The Modal app of a run: `MIXPREC_RUN=run.yaml modal deploy -m miles_mixprec.providers.modal_app`.

Containers import this module again and find their class in it, so it builds everything from the configuration alone.
"""

from miles_mixprec.providers.modal import build_app, container_config

built = build_app(container_config(), __name__)
app = built.app
globals().update(built.classes)
