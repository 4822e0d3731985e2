"""The fields that manifests may use: those of the operators' own definitions that are in common use, and no others.

They follow the Go types of kubeflow/mpi-operator (v2beta1), kubeflow/training-operator (v1), kubeflow/trainer
(v1alpha1) and Kubernetes (core/v1, batch/v1). A cluster would silently drop a misspelled or misplaced field.
"""

from typing import Any

Schema = dict[str, Any]
TEXT: Schema = {"type": "string"}
COUNT: Schema = {"type": "integer", "minimum": 0}
ANYTHING: Schema = {"type": "object"}


def one_of(*values: str) -> Schema:
    return {"enum": list(values)}


def a_list(of: Schema) -> Schema:
    return {"type": "array", "items": of}


def a_map(of: Schema) -> Schema:
    return {"type": "object", "additionalProperties": of}


def a_record(required: str = "", **fields: Schema) -> Schema:
    return {"type": "object", "properties": fields, "required": required.split(), "additionalProperties": False}


QUANTITY: Schema = {"type": "string", "pattern": r"^\d+(\.\d+)?(m|[kKMGT]i?)?$"}
VARIABLE = a_record(
    "name",
    name={"type": "string", "pattern": "^[A-Za-z_][A-Za-z0-9_]*$"},
    value=TEXT,
    valueFrom=a_record(fieldRef=a_record("fieldPath", fieldPath=TEXT), secretKeyRef=ANYTHING, configMapKeyRef=ANYTHING),
)
CONTAINER = a_record(
    "name image",
    name=TEXT,
    image=TEXT,
    imagePullPolicy=one_of("Always", "IfNotPresent", "Never"),
    command=a_list(TEXT),
    args=a_list(TEXT),
    workingDir=TEXT,
    env=a_list(VARIABLE),
    ports=a_list(a_record("containerPort", containerPort=COUNT, name=TEXT, protocol=one_of("TCP", "UDP"))),
    resources=a_record(limits=a_map(QUANTITY), requests=a_map(QUANTITY)),
    volumeMounts=a_list(a_record("name mountPath", name=TEXT, mountPath=TEXT, readOnly={"type": "boolean"})),
    securityContext=a_record(
        runAsUser=COUNT,
        runAsGroup=COUNT,
        runAsNonRoot={"type": "boolean"},
        readOnlyRootFilesystem={"type": "boolean"},
        allowPrivilegeEscalation={"type": "boolean"},
        privileged={"type": "boolean"},
        capabilities=a_record(add=a_list(TEXT), drop=a_list(TEXT)),
        seccompProfile=a_record(
            "type", type=one_of("RuntimeDefault", "Unconfined", "Localhost"), localhostProfile=TEXT
        ),
    ),
    readinessProbe=a_record(
        tcpSocket=a_record("port", port=COUNT, host=TEXT),
        exec=a_record("command", command=a_list(TEXT)),
        httpGet=ANYTHING,
        initialDelaySeconds=COUNT,
        periodSeconds=COUNT,
        timeoutSeconds=COUNT,
        failureThreshold=COUNT,
        successThreshold=COUNT,
    ),
)
POD = a_record(
    "containers",
    containers={**a_list(CONTAINER), "minItems": 1},
    initContainers=a_list(CONTAINER),
    restartPolicy=one_of("Always", "OnFailure", "Never"),
    subdomain=TEXT,
    hostname=TEXT,
    hostNetwork={"type": "boolean"},
    nodeSelector=a_map(TEXT),
    tolerations=a_list(ANYTHING),
    affinity=ANYTHING,
    volumes=a_list(ANYTHING),
    serviceAccountName=TEXT,
)
METADATA = a_record(name=TEXT, namespace=TEXT, labels=a_map(TEXT), annotations=a_map(TEXT))
TEMPLATE = a_record("spec", metadata=METADATA, spec=POD)
REPLICAS = a_record(
    "replicas template",
    replicas=COUNT,
    restartPolicy=one_of("Always", "OnFailure", "Never", "ExitCode"),
    template=TEMPLATE,
)
RUN_POLICY = a_record(
    cleanPodPolicy=one_of("All", "Running", "None"),
    ttlSecondsAfterFinished=COUNT,
    activeDeadlineSeconds=COUNT,
    backoffLimit=COUNT,
    schedulingPolicy=ANYTHING,
    suspend={"type": "boolean"},
)


def a_resource(version: str, kind: str, spec: Schema) -> Schema:
    metadata = {**METADATA, "required": ["name"]}
    return a_record(
        "apiVersion kind metadata spec", apiVersion=one_of(version), kind=one_of(kind), metadata=metadata, spec=spec
    )


MPI_JOB = a_resource(
    "kubeflow.org/v2beta1",
    "MPIJob",
    a_record(
        "mpiReplicaSpecs",
        slotsPerWorker={"type": "integer", "minimum": 1},
        runLauncherAsWorker={"type": "boolean"},
        runPolicy=RUN_POLICY,
        mpiReplicaSpecs=a_record("Launcher Worker", Launcher=REPLICAS, Worker=REPLICAS),
        sshAuthMountPath=TEXT,
        launcherCreationPolicy=one_of("AtStartup", "WaitForWorkersReady"),
        mpiImplementation=one_of("OpenMPI", "Intel", "MPICH"),
    ),
)
PYTORCH_JOB = a_resource(
    "kubeflow.org/v1",
    "PyTorchJob",
    a_record(
        "pytorchReplicaSpecs",
        runPolicy=RUN_POLICY,
        elasticPolicy=ANYTHING,
        pytorchReplicaSpecs=a_record("Master", Master=REPLICAS, Worker=REPLICAS),
        nprocPerNode={"type": "string", "pattern": r"^(auto|cpu|gpu|\d+)$"},
    ),
)
TRAIN_JOB = a_resource(
    "trainer.kubeflow.org/v1alpha1",
    "TrainJob",
    a_record(
        "runtimeRef",
        runtimeRef=a_record("name", name=TEXT, apiGroup=TEXT, kind=one_of("ClusterTrainingRuntime", "TrainingRuntime")),
        trainer=a_record(
            image=TEXT,
            command=a_list(TEXT),
            args=a_list(TEXT),
            env=a_list(VARIABLE),
            numNodes=COUNT,
            numProcPerNode={"anyOf": [COUNT, one_of("auto", "cpu", "gpu")]},
            resourcesPerNode=a_record(limits=a_map(QUANTITY), requests=a_map(QUANTITY)),
        ),
        suspend={"type": "boolean"},
        labels=a_map(TEXT),
        annotations=a_map(TEXT),
        managedBy=TEXT,
    ),
)
JOB = a_resource(
    "batch/v1",
    "Job",
    a_record(
        "template",
        template=TEMPLATE,
        completionMode=one_of("Indexed", "NonIndexed"),
        completions=COUNT,
        parallelism=COUNT,
        backoffLimit=COUNT,
        backoffLimitPerIndex=COUNT,
        maxFailedIndexes=COUNT,
        activeDeadlineSeconds=COUNT,
        ttlSecondsAfterFinished=COUNT,
    ),
)
SERVICE = a_resource(
    "v1",
    "Service",
    a_record(
        "selector",
        clusterIP=TEXT,
        selector=a_map(TEXT),
        publishNotReadyAddresses={"type": "boolean"},
        ports=a_list(ANYTHING),
    ),
)
BY_KIND = {"MPIJob": MPI_JOB, "PyTorchJob": PYTORCH_JOB, "TrainJob": TRAIN_JOB, "Job": JOB, "Service": SERVICE}
