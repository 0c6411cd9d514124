# One image, two sizes: the API needs no torch (EXTRAS=postgresql,mcp), a worker that starts local runs does
# (EXTRAS=postgresql,profiler,search). GPU hosts give their own base with CUDA: --build-arg BASE=...
ARG BASE=python:3.11-slim

FROM ${BASE} AS build
ARG EXTRAS=postgresql,mcp
WORKDIR /src
COPY pyproject.toml README.md LICENSE mkdocs.yml ./
COPY hp_tool hp_tool
COPY service service
COPY migrations migrations
COPY docs docs
RUN python -m venv /opt/hp-tool && /opt/hp-tool/bin/pip install --no-cache-dir ".[${EXTRAS}]"

FROM ${BASE}
# The data folder exists with its owner, so that a volume mounted on it inherits them.
RUN useradd --uid 10001 --create-home --shell /usr/sbin/nologin hp && install -d -o 10001 -g 10001 /home/hp/data
COPY --from=build /opt/hp-tool /opt/hp-tool
ENV PATH=/opt/hp-tool/bin:$PATH PYTHONUNBUFFERED=1
USER 10001
WORKDIR /home/hp
ENTRYPOINT ["hp-tool"]
CMD ["serve"]
