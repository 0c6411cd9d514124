# The lock file selects one of two images. LOCK=api has no torch; LOCK=worker has torch, for a worker that starts runs on its host.
# On GPU hosts, set a base image with CUDA: --build-arg BASE=...
ARG BASE=python:3.11.15-slim-bookworm

FROM ${BASE} AS build
ARG LOCK=api
WORKDIR /src
COPY requirements requirements
RUN python -m venv /opt/build && /opt/build/bin/pip install --no-cache-dir --require-hashes -r requirements/build.txt \
    && python -m venv /opt/hp-tool && /opt/hp-tool/bin/pip install --no-cache-dir --require-hashes -r "requirements/${LOCK}.txt"
COPY pyproject.toml README.md LICENSE mkdocs.yml ./
COPY hp_tool hp_tool
COPY service service
COPY migrations migrations
COPY docs docs
RUN /opt/build/bin/python -m build --wheel --no-isolation --outdir /dist \
    && /opt/hp-tool/bin/pip install --no-cache-dir --no-deps /dist/*.whl && /opt/hp-tool/bin/pip check

FROM ${BASE}
# Create the data folder with its owner, so that a volume mounted on it has the same owner.
RUN useradd --uid 10001 --create-home --shell /usr/sbin/nologin hp && install -d -o 10001 -g 10001 /home/hp/data
COPY --from=build /opt/hp-tool /opt/hp-tool
ENV PATH=/opt/hp-tool/bin:$PATH PYTHONUNBUFFERED=1
USER 10001
WORKDIR /home/hp
ENTRYPOINT ["hp-tool"]
CMD ["serve"]
