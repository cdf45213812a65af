// What reports draw with: nothing of Apache ECharts that they do not use. The page finds it as `window.echarts`.
import { init, use } from "echarts/core";
import { SankeyChart, TreemapChart } from "echarts/charts";
import { TooltipComponent } from "echarts/components";
import { CanvasRenderer } from "echarts/renderers";

use([SankeyChart, TreemapChart, TooltipComponent, CanvasRenderer]);
window.echarts = { init };
