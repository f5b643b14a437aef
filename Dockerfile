# efla_server and efla on Debian 12, for the CPU:
#
#   docker build -t efla .
#   docker run --rm --read-only --tmpfs /tmp -p 50051:50051 -p 127.0.0.1:9090:9090 efla
#
# serves the demonstration model; mount another at /model and add `--checkpoint /model`. With CUDA: put NVIDIA's
# cuda-keyring package for Debian 12 into deploy/cuda/ and build with the version's name in NVIDIA's packages:
#
#   docker build --build-arg CUDA=13-0 -t efla:cuda .
#   docker run --rm --gpus 1 --read-only --tmpfs /tmp -p 50051:50051 efla:cuda
#
# Packages come before sources, so that a changed source installs nothing; the compiler's cache outlives the layer, so
# that it compiles only what it is part of; and what is only installed comes last.
ARG DEBIAN=debian:12-slim

FROM ${DEBIAN} AS build
WORKDIR /src
COPY deploy/install_packages.sh deploy/packages.txt deploy/
RUN deploy/install_packages.sh build && rm -rf /var/lib/apt/lists/*
ARG CUDA=""
COPY deploy/cuda/ deploy/cuda/
RUN deploy/cuda/install.sh build "${CUDA}"
COPY CMakeLists.txt CMakePresets.json ./
COPY deploy/cmake/ deploy/cmake/
COPY deploy/build_jobs.sh deploy/
COPY proto/ proto/
COPY kernels/ kernels/
COPY model/ model/
COPY server/ server/
COPY client/ client/
RUN --mount=type=cache,target=/root/.cache/ccache \
    cmake --preset release -DEFLA_TESTS=OFF -DEFLA_CUDA="$(test -n "${CUDA}" && echo ON || echo OFF)" \
 && cmake --build build/release --parallel "$(deploy/build_jobs.sh)"
COPY README.md LICENSE CHANGELOG.md ./
RUN cmake --install build/release --prefix /opt/efla --strip

FROM ${DEBIAN} AS serve
ARG CUDA=""
COPY deploy/cuda/ /tmp/cuda/
RUN /tmp/cuda/install.sh serve "${CUDA}" && rm -rf /tmp/cuda
COPY --from=build /opt/efla /opt/efla
ARG VERSION=0.1.0
LABEL org.opencontainers.image.title="efla" \
      org.opencontainers.image.description="Inference server for EFLA language models over gRPC" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.licenses="Apache-2.0"
ENV PATH=/opt/efla/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin \
    EFLA_SERVER_LOG_FORMAT=json \
    EFLA_SERVER_CHECKPOINT=/opt/efla/share/efla/demo \
    EFLA_SERVER_DRAIN_DELAY=3 \
    NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility
# A number, so that Kubernetes can see that it is not root.
USER 65532:65532
WORKDIR /
EXPOSE 50051 9090
STOPSIGNAL SIGTERM
# Asks 127.0.0.1:50051 in plain text. A server on another port or with TLS needs in its container's environment what
# `efla` needs to reach it: EFLA_TARGET=127.0.0.1:PORT; EFLA_TLS=true, EFLA_TLS_CA=FILE, EFLA_TLS_SERVER_NAME=NAME;
# where it wants clients' certificates, EFLA_TLS_CERT and EFLA_TLS_KEY.
HEALTHCHECK --interval=5s --timeout=3s --start-period=120s --retries=3 \
  CMD ["/opt/efla/bin/efla", "health", "--timeout", "2"]
ENTRYPOINT ["/opt/efla/bin/efla_server"]
