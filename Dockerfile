# One image, two sizes: the API needs no torch (EXTRAS=postgresql), a worker that starts local runs does
# (EXTRAS=postgresql,profiler). GPU hosts give their own base with CUDA: --build-arg BASE=...
ARG BASE=python:3.11-slim

FROM ${BASE} AS build
ARG EXTRAS=postgresql
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY hp_tool hp_tool
COPY service service
COPY migrations migrations
RUN python -m venv /opt/hp-tool && /opt/hp-tool/bin/pip install --no-cache-dir ".[${EXTRAS}]"

FROM ${BASE}
RUN useradd --uid 10001 --create-home --shell /usr/sbin/nologin hp
COPY --from=build /opt/hp-tool /opt/hp-tool
ENV PATH=/opt/hp-tool/bin:$PATH PYTHONUNBUFFERED=1
USER 10001
WORKDIR /home/hp
# Ends a profile run's whole process group on SIGTERM before Docker's SIGKILL.
STOPSIGNAL SIGTERM
ENTRYPOINT ["hp-tool"]
CMD ["serve"]
